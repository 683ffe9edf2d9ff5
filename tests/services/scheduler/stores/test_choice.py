"""The choice between loading and computing."""

from pathlib import Path

import pytest

from services.scheduler.copy_times.times import MIN_TIMES, NUM_TIMES, TRY_EVERY, CopyTimes
from shared.wire.messages import Load
from tests.services.scheduler.stores.storing_worker import SimulatedStore
from tests.services.scheduler.stores.test_stores import CAPACITY, Mesh, Worker, cached_of, rows_of

SLOW, QUICK = 10.0, 1e-6  # seconds of a place, in which a token takes one to compute
NUM_WHOLE = 3  # full blocks of the prompt before its last token


class Turns:
    """Each turn has the same prompt at a worker with an empty cache. The blocks are in a store in
    memory, but for ``num_on_disk`` at the end."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, num_on_disk: int = 0) -> None:
        self.monkeypatch = monkeypatch
        self.mesh = Mesh(folder)
        self.store = SimulatedStore("one", 10, 1)
        self.disk = SimulatedStore("disk", 10, 1, is_disk=True)
        self.worker = Worker(self.mesh, "w0", self.store)
        self.num = 0
        self.mesh.ask("first")
        self.worker.run()
        for place in range(NUM_WHOLE - num_on_disk, len(self.store.records)):
            self.disk.records[place] = self.store.records.pop(place)
        self.restart()

    def restart(self) -> None:
        self.num += 1
        self.worker.die()
        self.worker = Worker(self.mesh, f"w{self.num}", self.store, CAPACITY, self.disk)
        share = self.worker.copies._worker.stream_share
        self.monkeypatch.setattr(share, "alone_s", lambda num, num_keys: float(num))

    def measure(self, memory_s: float, disk_s: float = 0.0) -> None:
        for _ in range(NUM_TIMES):
            self.worker.copies._choice.memory.note(1, memory_s)
            self.worker.copies._choice.on_disk.note(1, disk_s)

    def turn(self) -> tuple[int, int]:
        """The cached and the loaded blocks."""
        self.num += 1
        self.mesh.ask(f"r{self.num}")
        plans = self.worker.run(1)
        while self.mesh.core.sequences:
            self.worker.use_disk()
            plans += self.worker.run(1)
        return cached_of(plans)[0] // 4, len(rows_of(plans, Load))


@pytest.mark.parametrize(("memory_s", "num"), [(QUICK, NUM_WHOLE), (SLOW, 0), (0.0, NUM_WHOLE)])
async def test_a_load_from_memory_is_declined_if_computing_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory_s: float, num: int
) -> None:
    """A time that is not known declines none."""
    turns = Turns(tmp_path, monkeypatch)
    turns.measure(memory_s)
    assert turns.turn() == (num, num)


@pytest.mark.parametrize(
    ("disk_s", "found"), [(QUICK, (NUM_WHOLE, NUM_WHOLE)), (SLOW, (2, 2)), (0.0, (3, 3))]
)
async def test_a_slow_disk_leaves_the_blocks_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_s: float, found: tuple[int, int]
) -> None:
    turns = Turns(tmp_path, monkeypatch, num_on_disk=1)
    turns.measure(QUICK, disk_s)
    assert turns.turn() == found


async def test_the_copies_that_a_disk_has_to_do_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks take as long as the computation of two tokens, of twelve in all."""
    for num_ahead, num in ((0, NUM_WHOLE), (8, NUM_WHOLE), (10, 0)):
        turns = Turns(tmp_path, monkeypatch, num_on_disk=NUM_WHOLE)
        turns.measure(QUICK, 1.0)
        disk = turns.worker.copies.disk
        assert disk is not None
        disk._num_fetched_bytes = num_ahead
        turns.mesh.ask("r")
        turns.worker.run(1)
        (sequence,) = turns.mesh.core.sequences.values()
        assert sequence.num_cached == 4 * num


async def test_a_hit_is_loaded_after_many_were_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that was slow for a time is measured again."""
    turns = Turns(tmp_path, monkeypatch)
    for before, num, after in ((TRY_EVERY - 1, 0, TRY_EVERY), (TRY_EVERY, NUM_WHOLE, 0)):
        turns.measure(SLOW)
        choice = turns.worker.copies._choice._choice
        choice._num_declined = before
        assert turns.turn() == (num, num)
        assert choice._num_declined == after
        turns.restart()


async def test_output_goes_on_from_saved_bytes_at_any_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, monkeypatch)
    turns.mesh.ask("r", max_tokens=20)
    turns.worker.run(6)
    (sequence,) = turns.mesh.core.sequences.values()
    assert sequence.has_run
    turns.restart()
    turns.measure(SLOW)
    assert rows_of(turns.worker.run(), Load)
    assert not turns.mesh.core.sequences


async def test_workers_measure_their_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = Turns(tmp_path, monkeypatch, num_on_disk=1)
    turns.worker.simulated.byte_s = 0.25
    choice = turns.worker.copies._choice
    assert turns.turn() == (NUM_WHOLE, NUM_WHOLE)
    assert {*choice.memory._times} == {*choice.on_disk._times} == {0.25}
    turns.restart()
    turns.worker.simulated.byte_s = 0.25
    choice = turns.worker.copies._choice
    turns.disk.records.clear()
    turns.turn()
    assert not choice.on_disk._times, "the time of a lost block"


def test_few_times_are_no_measurement() -> None:
    times = CopyTimes()
    times.note(10, 0.0)
    times.note(0, 1.0)
    for number in range(1, MIN_TIMES):
        times.note(10, 10.0 * number)
        assert times.byte_s == 0
    times.note(10, 10.0 * MIN_TIMES)
    assert times.byte_s == (MIN_TIMES + 1) / 2
    for _ in range(NUM_TIMES):
        times.note(10, 70.0)
    assert times.byte_s == 7

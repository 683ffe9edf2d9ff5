"""Places that a reset has a worker forget, and a kill before it does."""

from pathlib import Path

import pytest

from services.scheduler.stores.disk import DiskCopies
from services.scheduler.stores.index import Location, Places, Store
from shared.wire.messages import Forget, Spilled, StepPlan
from tests.services.scheduler.stores.storing_worker import SimulatedStore
from tests.services.scheduler.stores.test_stores import (
    CAPACITY,
    Mesh,
    Worker,
    cached_of,
    key,
    rows_of,
)


class Killed:
    """A worker with a ``store`` and a ``disk`` that has answered a request, and its successors."""

    def __init__(self, folder: Path) -> None:
        self.mesh = Mesh(folder)
        self.store = SimulatedStore("one", 10, 1)
        self.disk = SimulatedStore("disk", 10, 1, is_disk=True)
        self.num = 0
        self.start()

    def start(self) -> None:
        self.num += 1
        self.worker = Worker(self.mesh, f"w{self.num}", self.store, CAPACITY, self.disk)

    def restart(self) -> None:
        self.worker.die()
        self.start()

    def reset(self) -> None:
        self.mesh.service.commands()["reset_prefix_cache"]()

    def cached(self) -> int:
        self.mesh.ask(f"r{self.num}")
        plans = self.worker.run(1)
        while self.mesh.core.sequences:
            self.worker.use_disk()
            plans += self.worker.run(1)
        return cached_of(plans)[0]


@pytest.fixture
async def killed(tmp_path: Path) -> Killed:
    found = Killed(tmp_path)
    found.mesh.ask("first")
    found.worker.run()
    return found


def move_to_disk(killed: Killed) -> None:
    killed.worker.die()
    killed.disk.records, killed.store.records = killed.store.records, {}
    killed.start()


async def test_a_place_on_a_disk_is_forgotten_again_after_a_kill(killed: Killed) -> None:
    """The thread of the disk had not cleared it."""
    move_to_disk(killed)
    killed.reset()
    plans = killed.worker.run()
    assert len(rows_of(plans, Forget)) == len(killed.disk.records) == 4
    killed.restart()
    assert killed.cached() == 0
    assert not killed.disk.records
    killed.restart()
    assert killed.cached() == 12, "blocks that were saved later are there"


@pytest.mark.parametrize("is_done", [True, False])
async def test_a_block_that_is_saved_during_a_reset_does_not_return(
    killed: Killed, is_done: bool
) -> None:
    """The worker dies after it has saved the block, or before, and gives no answer."""
    killed.reset()
    killed.worker.run()
    assert not killed.store.records
    killed.mesh.ask("r", max_tokens=1)
    mesh, peer = killed.mesh, killed.worker.peer
    while not killed.worker.copies.reach.memory.saving:
        killed.worker.run(1)
        mesh.service._plan()
    killed.reset()
    if is_done:
        for plan, _ in peer.take(StepPlan):
            killed.worker.simulated.copy(plan)
        assert killed.store.records
    for sequence in [*mesh.core.sequences.values()]:
        mesh.core.cancel(sequence.key)
    killed.restart()
    assert not killed.worker.copies.store.parts[0].full
    killed.worker.run()
    assert not killed.store.records


async def test_an_overwritten_place_is_forgotten_if_its_worker_dies_before(killed: Killed) -> None:
    """The plan with the new block in a forgotten place has not run."""
    killed.reset()
    (part,) = killed.worker.copies.store.parts
    part.take()
    assert len(part.forgets) == 3
    killed.worker.run()
    killed.restart()
    assert not killed.worker.copies.store.parts[0].full
    assert killed.cached() == 0


def test_places_on_a_disk_are_clear_once_a_later_spill_is_done() -> None:
    memory, disk = (
        Store(name, [Places(4, 1, {key(first + number): number for number in range(4)})])
        for name, first in (("memory", 0), ("disk", 10))
    )
    copies = DiskCopies(Location(), disk, memory)
    (above,), (part,) = memory.parts, disk.parts
    disk.forget_all()
    copies.clearing.append((3, part, part.send_forgets(3, most=3)))
    assert [*part.stale.values()].count(3) == 3
    for step, num_stale in ((2, 3), (3, 0)):  # each spill overwrites a place
        above.take()
        assert copies.spills(step)
        copies.note_spilled(Spilled(step))
        assert len(part.stale) == num_stale, step
    part.forget(key(0))
    part.note_cleared([*part.stale], 3)
    assert len(part.stale) == 1, "a place that is stale again"

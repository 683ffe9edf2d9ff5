"""A worker's end of the link: orders, reports, and checks of plans."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.engines import make_engine
from services.worker.adapters.extension import OFF, RANKS, WorkerAdapters
from services.worker.extension import WorkerCore
from services.worker.step_thread import StepThread
from shared.errors import CodecError
from shared.settings.worker import WorkerConfig
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    ADAPTERS_MINOR,
    PROTOCOL_MAJOR,
    Adapter,
    Adapters,
    Admit,
    ForgetAdapter,
    Hello,
    LoadAdapter,
    Reset,
    SamplingParams,
    StepPlan,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.worker.adapters.adapter_folders import random_layers, write_adapter
from tests.services.worker.adapters.made import adapters_of, shapes_of

WAIT_S = 30


def scheduler(minor: int = ADAPTERS_MINOR) -> FakePeer:
    return FakePeer(Hello(PROTOCOL_MAJOR, minor, "scheduler", "s"))


def write(folder: Path, checkpoint: Path, seed: int = 0) -> None:
    write_adapter(folder, random_layers(shapes_of(checkpoint), 4, seed))


class Worker:
    """An extension with an engine, and the schedulers that it reports to."""

    def __init__(self, engine: Any, **settings: Any) -> None:
        self.peer, self.old = scheduler(), scheduler(ADAPTERS_MINOR - 1)
        self.step_thread, self.engine = StepThread(), engine
        self.adapters = WorkerAdapters(
            WorkerCore(
                WorkerConfig(**settings),
                engine,
                self.step_thread,
                lambda: [self.peer, self.old],
                lambda: self.peer,
            )
        )

    def close(self) -> None:
        self.adapters.close()
        self.step_thread.executor.shutdown()

    def order(self, message: LoadAdapter | ForgetAdapter) -> None:
        assert self.adapters.takes(self.peer, message)

    async def reported(self, is_there: Callable[[list[Adapter]], object]) -> list[Adapter]:
        """The first list with something."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for message, _ in self.peer.take(Adapters):
                    if is_there(message.adapters):
                        return message.adapters
                await asyncio.sleep(0.005)


@pytest.fixture
def worker(checkpoint: Path, tmp_path: Path) -> Iterator[Worker]:
    """Adapters a and b are loaded, and two may be in slots."""
    directory = tmp_path / "adapters"
    for seed, name in enumerate("ab"):
        write(directory / name, checkpoint, seed)
    settings: dict[str, Any] = {"lora_dir": directory, "max_loras": 2, "max_cpu_loras": 8}
    worker = Worker(make_engine(checkpoint, "native", **settings), **settings)
    yield worker
    worker.close()


def admitted(slot: int, adapter: str) -> Admit:
    options = write_options(RequestOptions(adapter=adapter))
    return Admit(slot, f"{slot}", 1, 0, 0, 4, 4, 0, SamplingParams(seed=0), [slot], options=options)


def plan(*admits: Admit, release: tuple[int, ...] = ()) -> StepPlan:
    return StepPlan(1, [*release], [*admits], [], [], [])


async def test_reports_go_to_schedulers_that_know_them(worker: Worker) -> None:
    for peer in (worker.peer, worker.old):
        worker.adapters.on_up(peer)
    ((message, _),) = worker.peer.take(Adapters)
    assert [row.name for row in message.adapters] == ["a", "b"]
    assert not worker.old.got
    assert not worker.adapters.takes(worker.peer, Reset())


async def test_orders(worker: Worker, checkpoint: Path, tmp_path: Path) -> None:
    write(tmp_path / "adapters" / "c", checkpoint, 2)
    worker.order(LoadAdapter("l1", "c", "c"))
    worker.order(LoadAdapter("l1", "c", "c"))
    rows = await worker.reported(lambda rows: rows[-1].load == "l1")
    digest = rows[-1].digest
    table = adapters_of(worker.engine).table
    assert digest in table
    worker.order(LoadAdapter("l2", "d", "nothing"))
    rows = await worker.reported(lambda rows: rows[-1].load == "l2")
    assert rows[-1].problem == "there is no such folder"
    worker.order(ForgetAdapter(digest))
    with pytest.raises(CodecError, match="is not loaded"):
        worker.adapters.check(plan(admitted(0, digest)), [])
    rows = await worker.reported(lambda rows: all(row.digest != digest for row in rows))
    assert [row.name for row in rows] == ["a", "b", "d"]
    assert digest not in table
    worker.order(LoadAdapter("l3", "c", "c"))
    rows = await worker.reported(lambda rows: any(row.load == "l3" for row in rows))
    assert digest in table
    assert digest in {row.digest for row in rows}


async def test_an_order_to_forget_that_crosses_a_load_of_the_same_bytes(worker: Worker) -> None:
    """The load came first, so the adapter stays."""
    digest = worker.adapters.rows[0].digest
    worker.order(LoadAdapter("l1", "a", "a"))
    worker.order(ForgetAdapter(digest))
    await worker.reported(lambda rows: any(row.load == "l1" for row in rows))
    assert digest in adapters_of(worker.engine).table
    worker.adapters.check(plan(admitted(0, digest)), [])


async def test_an_unforeseen_error_refuses_one_adapter(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("services.worker.adapters.store.AdapterFolder", fail)
    worker.order(LoadAdapter("l1", "c", "a"))
    rows = await worker.reported(lambda rows: rows[-1].load == "l1")
    assert rows[-1].problem == "it cannot be loaded; the worker's log has the reason"
    assert [row.name for row in rows] == ["a", "b", "c"]


async def test_plans(worker: Worker) -> None:
    a, b = (row.digest for row in worker.adapters.rows)

    def check(plan: StepPlan) -> None:
        worker.adapters.check(plan, [])

    check(plan(admitted(0, a), admitted(1, b), admitted(2, ""), admitted(3, a)))
    with pytest.raises(CodecError, match=r"slot 4 has adapter 0+, which is not loaded"):
        check(plan(admitted(4, 32 * "0")))


async def test_more_adapters_in_slots_than_the_worker_has_room_for(
    worker: Worker, checkpoint: Path, tmp_path: Path
) -> None:
    write(tmp_path / "adapters" / "c", checkpoint, 2)
    worker.order(LoadAdapter("l1", "c", "c"))
    rows = await worker.reported(lambda rows: rows[-1].load == "l1")
    a, b, c = (row.digest for row in rows)
    worker.adapters.check(plan(admitted(0, a), admitted(1, b)), [])
    worker.adapters.check(plan(admitted(2, c), release=(1,)), [])
    with pytest.raises(CodecError, match="3 adapters in slots; max-loras is 2"):
        worker.adapters.check(plan(admitted(1, b)), [])


@pytest.mark.parametrize(
    ("enables", "settings", "problem"),
    [(False, {}, OFF), (True, {"tensor_parallel_size": 2}, RANKS)],
)
async def test_workers_that_load_nothing(
    checkpoint: Path, enables: bool, settings: dict[str, Any], problem: str
) -> None:
    worker = Worker(make_engine(checkpoint, "native", enable_lora=enables), **settings)
    worker.order(LoadAdapter("l1", "a", "a"))
    worker.order(ForgetAdapter(32 * "0"))
    (row,) = await worker.reported(lambda rows: rows)
    assert (row.load, row.problem) == ("l1", problem)
    worker.close()

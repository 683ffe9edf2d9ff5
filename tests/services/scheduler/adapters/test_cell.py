"""The adapters of a scheduler's workers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from msgspec.structs import replace

from services.scheduler.adapters.cell import FORGET_S, CellAdapters
from services.scheduler.scheduler import Planned
from services.scheduler.service import SchedulerService
from shared.adapters.joined import served
from shared.errors import ADAPTER_LOST, NO_WORKER
from shared.settings.scheduler import SchedulerConfig
from shared.wire.envelope import RequestOptions, read_options, write_options
from shared.wire.messages import (
    ADAPTERS_MINOR,
    PROTOCOL_MAJOR,
    Accepted,
    Adapter,
    Adapters,
    Attach,
    Capacity,
    Failed,
    ForgetAdapter,
    Generate,
    Heartbeat,
    Hello,
    LoadAdapter,
    ModelInfo,
    NewSequence,
    SamplingParams,
    ServiceName,
    State,
    StepPlan,
    Tokens,
    UnloadAdapter,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.scheduler.simulated_worker import SimulatedWorker

SQL = Adapter(name="sql", digest="1" * 32, loaded_s=1.0, load="l1", path="sql/v1")
LAW = Adapter(name="law", digest="2" * 32, loaded_s=1.0)
MODEL = ModelInfo(["m"], "f", 1000, 64, 1)
CAPACITY = Capacity(32, 4, 4, 16, 64, 1000, max_adapters=2)
PROMPT = np.array([5, 6, 7, 8], np.int32)
NO_IDS = PROMPT[:0]


def peer(service: ServiceName, name: str = "", minor: int = ADAPTERS_MINOR) -> FakePeer:
    capacity = CAPACITY if service == "worker" else None
    hello = Hello(PROTOCOL_MAJOR, minor, service, name or service, MODEL, capacity)
    return FakePeer(hello)


class Mesh:
    """A scheduler between a tokenizer and workers."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        config = SchedulerConfig(mesh_dir=folder, instance="s", **settings)
        self.service = SchedulerService(config)
        self.tokenizer = peer("tokenizer")
        self.service.on_up(self.tokenizer)
        self.adapters = self.service._extensions[0]
        assert isinstance(self.adapters, CellAdapters)

    def worker(self, name: str, *adapters: Adapter, attaches: bool = True) -> FakePeer:
        worker = peer("worker", name)
        self.service.on_up(worker)
        self.report(worker, *adapters)
        if attaches:
            self.service.on_message(worker, Attach(), [])
        return worker

    def report(self, worker: FakePeer, *adapters: Adapter) -> None:
        self.service.on_message(worker, Adapters(list(adapters)), [])

    def listed(self) -> list[Adapter]:
        """The tokenizer's last list."""
        return [each.adapters for each, _ in self.tokenizer.take(Adapters)][-1]

    def order(self, message: LoadAdapter | UnloadAdapter) -> None:
        self.service.on_message(self.tokenizer, message, [])

    async def ask(self, adapter: str, name: str = "r~1/0", max_tokens: int = 6) -> list[Failed]:
        options = write_options(RequestOptions(adapter=adapter))
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        generate = Generate(name, 1, params, [NewSequence(f"{name}/0")], options=options)
        self.service.on_message(self.tokenizer, generate, [PROMPT, NO_IDS])
        await asyncio.sleep(0)
        return [failed for failed, _ in self.tokenizer.take(Failed)]


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    mesh = Mesh(tmp_path, worker_grace_s=0.05)
    yield mesh
    await mesh.service._link.close("the end")


async def test_tokenizers_get_the_joined_list_of_attached_workers_on_changes_alone(mesh: Mesh):
    mesh.worker("a", SQL, attaches=False)
    assert not mesh.tokenizer.take(Adapters)
    mesh.worker("b", SQL)
    assert mesh.listed() == [SQL]
    worker = mesh.worker("c", SQL, LAW)
    assert mesh.listed() == [LAW, replace(SQL, num_workers=2)]
    mesh.report(worker, SQL, LAW)
    assert not mesh.tokenizer.take(Adapters)
    other = peer("tokenizer", "other")
    mesh.service.on_up(other)
    assert [each.adapters for each, _ in other.take(Adapters)] == [
        [LAW, replace(SQL, num_workers=2)]
    ]
    mesh.service.on_down(worker, "gone")
    assert mesh.listed() == [SQL]


async def test_older_peers_get_no_message_about_adapters(mesh: Mesh):
    old = peer("tokenizer", "old", ADAPTERS_MINOR - 1)
    mesh.service.on_up(old)
    mesh.worker("a", SQL)
    old_worker = peer("worker", "old", ADAPTERS_MINOR - 1)
    mesh.service.on_up(old_worker)
    mesh.service.on_message(old_worker, Attach(), [])
    mesh.order(LoadAdapter("l2", "law", "law"))
    assert not old.take(Adapters)
    assert not old_worker.take(LoadAdapter)


async def test_an_order_reaches_each_attached_worker_once(mesh: Mesh):
    a, b = mesh.worker("a"), mesh.worker("b", attaches=False)
    order = LoadAdapter("l2", "law", "law")
    for _ in range(2):
        mesh.order(order)
    assert [each for each, _ in a.take(LoadAdapter)] == [order]
    assert not b.take(LoadAdapter)


async def test_a_late_worker_loads_the_adapters_of_the_others(mesh: Mesh):
    mesh.worker("a", SQL, LAW)
    late, same = mesh.worker("b"), mesh.worker("c", SQL)
    expected = LoadAdapter("l1", "sql", "sql/v1")
    assert [each for each, _ in late.take(LoadAdapter)] == [expected]
    assert not same.take(LoadAdapter)
    mesh.order(UnloadAdapter("sql", "u1"))
    assert not mesh.worker("d").take(LoadAdapter)


async def test_a_worker_gets_an_order_that_is_open_when_it_attaches_and_each_order_once(mesh: Mesh):
    order = LoadAdapter("l2", "law", "law")
    mesh.order(order)
    a = mesh.worker("a")
    moved = mesh.worker("b", attaches=False)
    mesh.service.on_message(moved, Attach(), [])
    mesh.report(a, SQL)
    assert [each for each, _ in moved.take(LoadAdapter)] == [
        order,
        LoadAdapter("l1", "sql", "sql/v1"),
    ], "another worker has loaded it meanwhile"
    mesh.report(moved, SQL)
    mesh.report(a, SQL, replace(LAW, load="l2", path="law"))
    assert [each for each, _ in a.take(LoadAdapter)] == [order]
    assert not moved.take(LoadAdapter)
    mesh.service.on_down(a, "gone")
    late = mesh.worker("c", SQL)
    assert [each for each, _ in late.take(LoadAdapter)] == [order], "no worker has it any more"


async def test_a_refused_order_is_not_repeated(mesh: Mesh):
    a = mesh.worker("a")
    mesh.order(LoadAdapter("l2", "law", "law"))
    mesh.report(a, Adapter(name="law", load="l2", problem="no folder"))
    mesh.service.on_down(a, "gone")
    assert not mesh.worker("b").take(LoadAdapter)


async def test_a_restarted_worker_does_not_bring_replaced_bytes_back(mesh: Mesh):
    first = replace(SQL, load="", path="")
    newer = replace(SQL, digest="3" * 32, loaded_s=2.0)
    mesh.worker("a", first, newer)
    b = mesh.worker("b", first, newer)
    mesh.service.on_down(b, "restarts")
    b = mesh.worker("b", replace(first, loaded_s=3.0))
    assert served(mesh.listed()) == {"sql": newer}
    assert [each for each, _ in b.take(LoadAdapter)] == [LoadAdapter("l1", "sql", "sql/v1")]


async def test_a_late_copy_of_an_unloading_leaves_a_later_load_alone(mesh: Mesh):
    worker = mesh.worker("a", SQL)
    again = replace(SQL, load="l2", loaded_s=2.0)
    for message in (UnloadAdapter("sql", "u1"), LoadAdapter("l2", "sql", "sql/v1")):
        mesh.order(message)
    mesh.order(UnloadAdapter("sql", "u1"))
    mesh.report(worker, again)
    assert mesh.listed() == [again]
    mesh.order(UnloadAdapter("sql", "u2"))
    assert mesh.listed() == [replace(again, is_retired=True)]


async def test_workers_with_different_bytes_of_a_name_are_logged_once(
    mesh: Mesh, caplog: pytest.LogCaptureFixture
):
    other = replace(SQL, digest="3" * 32, loaded_s=2.0)
    a, b = mesh.worker("a", SQL), mesh.worker("b", other)
    for loaded_s in (3.0, 4.0):
        mesh.report(a, replace(SQL, loaded_s=loaded_s), LAW)
        mesh.report(b, other)
    (record,) = caplog.records
    assert (record.levelname, record.args) == ("WARNING", ("sql", other.digest, SQL.digest))


async def test_a_request_without_a_worker_for_its_adapter_is_refused(mesh: Mesh):
    (failed,) = await mesh.ask(SQL.digest)
    assert (failed.status, failed.code) == (503, NO_WORKER), "it may come with the worker"
    mesh.worker("a", LAW)
    mesh.worker("b", SQL, attaches=False)
    (failed,) = await mesh.ask(SQL.digest)
    assert (failed.status, failed.code) == (503, ADAPTER_LOST)
    assert SQL.digest in failed.message
    assert not await mesh.ask(LAW.digest)


async def test_sequences_of_a_lost_worker_go_on_where_their_adapter_is(mesh: Mesh):
    a, b = mesh.worker("a", SQL, LAW), mesh.worker("b", LAW)
    for each in (a, b):
        each.status = Heartbeat(State.READY, "", 0, 0)
    assert not await mesh.ask(SQL.digest, "s~1/0")
    assert not await mesh.ask(LAW.digest, "t~1/0")
    assert a.take(StepPlan)
    mesh.service.on_down(a, "killed")
    await asyncio.sleep(0)
    admitted = [row for plan, _ in b.take(StepPlan) for row in plan.admit]
    assert {read_options(row.options).adapter for row in admitted} == {LAW.digest}
    await asyncio.sleep(0.1)
    (failed,) = [failed for failed, _ in mesh.tokenizer.take(Failed)]
    assert (failed.request, failed.status, failed.code) == ("s~1/0/0", 503, ADAPTER_LOST)


async def test_a_sequence_waits_for_a_worker_that_loads_its_adapter(mesh: Mesh):
    a, b = mesh.worker("a", SQL), mesh.worker("b")
    assert not await mesh.ask(SQL.digest)
    mesh.service.on_down(a, "leaves")
    mesh.report(b, SQL)
    await asyncio.sleep(0.1)
    assert not mesh.tokenizer.take(Failed)
    assert b.take(StepPlan)


async def test_an_unloaded_adapter_is_kept_for_its_requests_and_forgotten_after_them(mesh: Mesh):
    worker, simulated = mesh.worker("a", SQL, LAW), SimulatedWorker(CAPACITY)
    assert not await mesh.ask(SQL.digest)
    mesh.order(UnloadAdapter("sql", "u1"))
    assert mesh.listed() == [LAW, replace(SQL, is_retired=True)]
    mesh.adapters.look(1000.0)
    mesh.adapters.look(1000.0 + 2 * FORGET_S)
    assert not worker.take(ForgetAdapter), "a request has it"
    while plans := worker.take(StepPlan):
        for plan, (ids,) in plans:
            result, arrays = simulated.step(Planned(plan, ids))
            mesh.service.on_message(worker, result, list(arrays))
        await asyncio.sleep(0)
    assert not mesh.service._core.sequences
    mesh.adapters.look(1000.0 + 2.9 * FORGET_S)
    assert not worker.take(ForgetAdapter), "a request may come back"
    for _ in range(2):
        mesh.adapters.look(1000.0 + 3 * FORGET_S)
    assert [each for each, _ in worker.take(ForgetAdapter)] == [ForgetAdapter(SQL.digest)]
    mesh.report(worker, LAW)
    assert mesh.listed() == [LAW]
    assert mesh.tokenizer.take(Accepted)
    assert mesh.tokenizer.take(Tokens)


async def test_a_forgotten_adapter_takes_no_request_though_a_list_on_its_way_has_it(mesh: Mesh):
    worker = mesh.worker("a", SQL, LAW)
    mesh.order(UnloadAdapter("sql", "u1"))
    for now_s in (0.0, FORGET_S):
        mesh.adapters.look(now_s)
    assert worker.take(ForgetAdapter)
    assert mesh.listed() == [LAW]
    for adapters in ([SQL, LAW], [LAW, SQL]):
        (failed,) = await mesh.ask(SQL.digest)
        assert (failed.status, failed.code) == (503, ADAPTER_LOST)
        mesh.report(worker, *adapters)
    assert not mesh.tokenizer.take(Adapters)
    again = replace(SQL, load="l2", loaded_s=2.0)
    mesh.report(worker, LAW, again)
    assert mesh.listed() == [LAW, again]
    assert not await mesh.ask(SQL.digest)
    mesh.adapters.look(2 * FORGET_S)
    assert not worker.take(ForgetAdapter)


async def test_an_adapter_that_is_being_loaded_again_is_not_forgotten(mesh: Mesh):
    worker = mesh.worker("a", SQL)
    mesh.order(UnloadAdapter("sql", "u1"))
    mesh.adapters.look(0.0)
    mesh.order(LoadAdapter("l2", "sql", "sql/v1"))
    mesh.adapters.look(FORGET_S)
    assert not worker.take(ForgetAdapter), "the order comes first, and may be for the same bytes"
    mesh.report(worker, SQL, replace(SQL, digest="3" * 32, load="l2", loaded_s=2.0))
    for now_s in (2 * FORGET_S, 3 * FORGET_S):
        mesh.adapters.look(now_s)
    assert [each for each, _ in worker.take(ForgetAdapter)] == [ForgetAdapter(SQL.digest)]


async def test_bytes_with_another_name_are_not_forgotten(mesh: Mesh):
    worker = mesh.worker("a", SQL, replace(SQL, name="query"))
    mesh.order(UnloadAdapter("sql", "u1"))
    for now_s in (0.0, 2 * FORGET_S):
        mesh.adapters.look(now_s)
    assert not worker.take(ForgetAdapter)


async def test_a_worker_of_another_cell_keeps_retired_adapters_for_its_requests(mesh: Mesh):
    mesh.worker("a", SQL)
    mesh.order(UnloadAdapter("sql", "u1"))
    mesh.adapters.look(0.0)
    b = mesh.worker("b", SQL)
    mesh.adapters.look(FORGET_S)
    assert not b.take(ForgetAdapter), "their replays may be on the way"


async def test_a_replaced_adapter_stays_until_its_requests_have_ended(mesh: Mesh):
    worker = mesh.worker("a", SQL)
    newer = replace(SQL, digest="3" * 32, loaded_s=2.0, load="l2")
    assert not await mesh.ask(SQL.digest)
    mesh.report(worker, SQL, newer)
    assert mesh.listed() == [replace(SQL, is_retired=True), newer]
    assert not await mesh.ask(newer.digest, "s~1/0")
    with patch.object(mesh.service._core, "sequences", {}):
        mesh.adapters.look(0.0)
        mesh.adapters.look(FORGET_S)
    assert [each for each, _ in worker.take(ForgetAdapter)] == [ForgetAdapter(SQL.digest)]

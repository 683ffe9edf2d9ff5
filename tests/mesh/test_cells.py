"""Several schedulers, each with workers of its own."""

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.checked_load import Load
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from services.scheduler import service as scheduler_service
from services.scheduler.cells import handover
from services.scheduler.scheduler import Scheduler
from services.scheduler.service import SchedulerService
from services.worker import attachment
from services.worker.service import WorkerService
from shared.process.report import is_fit, make_report
from shared.wire.messages import State
from tests.mesh.forks import fork
from tests.mesh.mesh import TEXT, Mesh, ask, running_mesh
from tests.mesh.test_chain import client_of

LONG = [7] * 100
NUM_STREAMS = 8


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attachment, "SETTLED_S", 0.2)
    monkeypatch.setattr(handover, "TURN_S", 0.05)


def schedulers_of(mesh: Mesh) -> list[SchedulerService]:
    return [each for name, each in mesh.services.items() if name.startswith("scheduler")]


def known_loads(mesh: Mesh) -> list[int]:
    """Each tokenizer's view of each scheduler, by its last heartbeat."""
    tokenizers = [mesh.services[name] for name in ("tokenizer", "tokenizer-1")]
    overviews = [each for tokenizer in tokenizers for each in tokenizer._schedulers.overviews]
    return [each.num_running + each.num_waiting for each in overviews]


async def until_balanced(mesh: Mesh) -> None:
    """Waits until every tokenizer knows it, too."""
    await mesh.until(lambda: all(len(each._workers) == 1 for each in schedulers_of(mesh)))
    await mesh.until_ready()
    tokenizers = [each for name, each in mesh.services.items() if name.startswith("tokenizer")]
    peers = [peer for each in tokenizers for peer in each._schedulers]
    assert len(peers) == len(tokenizers) * len(schedulers_of(mesh))
    await mesh.until(lambda: all(peer.is_ready for peer in peers))


async def check_stream(client, num: int, begun: asyncio.Event, prompt: object = "Once") -> None:
    """Every token arrives once and in order."""
    stream = await client.completions.create(
        model="shoal-tiny", prompt=prompt, max_tokens=num, stream=True
    )
    text = ""
    async for chunk in stream:
        text += chunk.choices[0].text
        begun.set()
    assert text == (TEXT * 80)[: len(text)]
    assert chunk.choices[0].finish_reason == "length"


async def until_counted(mesh: Mesh) -> None:
    """Waits until the gateway knows both schedulers and both workers."""
    lines = {f'shoal_mesh_replicas{{service="{kind}"}} 2.0' for kind in ("scheduler", "worker")}
    async with aiohttp.ClientSession(mesh.url()) as http, asyncio.timeout(20):
        while not lines <= {*(await (await http.get("/metrics")).text()).splitlines()}:
            await asyncio.sleep(0.05)


class Streams:
    """Concurrent streams; ``begun`` is set when each has a token."""

    def __init__(self, client, num: int, num_tokens: int) -> None:
        self._events = [asyncio.Event() for _ in range(num)]
        self.tasks = [
            asyncio.create_task(check_stream(client, num_tokens, event)) for event in self._events
        ]

    async def begun(self) -> None:
        await asyncio.gather(*(event.wait() for event in self._events))

    async def ended(self) -> None:
        await asyncio.gather(*self.tasks)


async def test_prompts_are_spread_over_cells_except_ones_with_a_common_prefix(tmp_path: Path):
    async with (
        running_mesh(tmp_path, num_schedulers=2, num_workers=2, num_tokenizers=2) as mesh,
        client_of(mesh) as client,
    ):
        await until_balanced(mesh)
        streams = Streams(client, 8, 100)
        await streams.begun()
        nums = [len(core.sequences) for core in mesh.cores]
        assert sum(nums) == 8
        assert min(nums) >= 2, "the other tokenizer's prompts are known a moment later"
        roles = await ask(mesh)
        assert [len(each["links"]) for each in roles["scheduler"]] == [1, 1]
        assert [len(each["links"]) for each in roles["tokenizer"]] == [2, 2]
        assert sum(each["stats"]["running"] for each in roles["scheduler"]) == 8
        await streams.ended()
        await until_counted(mesh)
        await mesh.until(lambda: not any(known_loads(mesh)))
        counts: Counter[bool] = Counter()
        for number in range(6):
            await client.completions.create(
                model="shoal-tiny", prompt=[*LONG, 8 + number], max_tokens=3
            )
            counts.update(core.num_prefix_hits > 0 for core in mesh.cores)
        assert counts[True] == 5, "after the first one, one of the cells has a part of each"
        await mesh.until_idle()


async def test_a_scheduler_without_a_worker_stands_by_until_the_other_one_is_lost(tmp_path: Path):
    """A stream continues through it, and the returning one stands by in its turn."""
    async with (
        running_mesh(tmp_path, num_schedulers=2, num_workers=1, step_s=0.004) as mesh,
        client_of(mesh) as client,
    ):
        await mesh.until_ready()
        for _ in range(2):
            await mesh.until(lambda: sum(each.stands_by for each in schedulers_of(mesh)) == 1)
            (at_work,) = [name for name, each in mesh.services.items()
                          if name.startswith("scheduler") and not each.stands_by]  # fmt: skip
            (spare,) = [each for each in schedulers_of(mesh) if each.stands_by]
            assert is_fit(spare)
            assert make_report(spare._link, {}).state == State.READY
            assert spare.status().state == State.NOT_READY, "tokenizers are to send it nothing"
            assert spare.status().reason == "stands by: other schedulers have the workers"
            streams = Streams(client, 2, 250)
            await streams.begun()
            assert not spare._core.sequences
            await mesh.lose(at_work, says_bye=False)
            await mesh.until(lambda spare=spare: spare._core.sequences)
            mesh.start(at_work)
            await streams.ended()
        await mesh.lose("worker", says_bye=False)
        await mesh.until(lambda: not any(is_fit(each) for each in schedulers_of(mesh)))


@pytest.mark.slow
async def test_prompts_that_wait_for_a_slow_worker_move_to_slots_that_are_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(scheduler_service, "LOOK_S", 0.1)
    monkeypatch.setattr(handover, "PATIENCE_S", 0.2)
    async with (
        running_mesh(tmp_path, num_schedulers=2, num_workers=2) as mesh,
        client_of(mesh) as client,
    ):
        await until_balanced(mesh)
        (other,) = (each for each in mesh.engines.values() if each is not mesh.engine)
        mesh.engine.step_s = other.step_s = 0.2  # until some wait for the one that stays slow
        (slow,) = [core for core in mesh.cores if is_of(mesh.services["worker"], core)]
        streams = Streams(client, 24, 200)
        (worker,) = slow.workers.values()
        await mesh.until(lambda: len(worker.running) == 8 and slow.queues)
        other.step_s = 0.002
        running = {each.key for each in worker.running.values()}
        await mesh.until(lambda: set(slow.sequences) <= running)
        assert set(slow.sequences) == running, "all others have moved before one of these ended"
        mesh.engine.step_s = 0.002
        await streams.ended()
        await mesh.until_idle()


def is_of(worker: WorkerService, core: Scheduler) -> bool:
    return any(name.startswith(f"{worker._config.instance}/") for name in core.workers)


@pytest.mark.slow
async def test_a_request_that_workers_die_of_is_found_out_in_whichever_cell_it_is(tmp_path: Path):
    """The second worker runs it alone."""
    poison = 4242
    settings = {"TEST_POISON": str(poison), "DTYPE": "float32", "MAX_MODEL_LEN": "512"}
    async with running_fleet(tmp_path, settings, fork) as fleet:
        await start(fleet, scheduler=2, tokenizer=1, gateway=1)
        for _ in range(2):
            await fleet.start("worker", module="tests.mesh.poisoned_worker")
        await fleet.until_ready()
        (gateway,) = fleet.of("gateway")
        async with aiohttp.ClientSession(gateway.url) as http:
            body = {"prompt": [5, poison], "max_tokens": 3}
            async with http.post("/v1/completions", json=body) as reply:
                assert reply.status == 500
                assert (await reply.json())["error"]["code"] == "worker_died"


async def start(fleet: Fleet, **nums: int) -> None:
    for kind, num in nums.items():
        for _ in range(num):
            await fleet.start(kind)


async def replace(fleet: Fleet, old: Member) -> None:
    """Replaces it as an upgrade does."""
    new = await fleet.start("scheduler")
    while "state" not in await new.status():
        await asyncio.sleep(0.05)
    assert await fleet.stop(old) == 0
    await new.until_ready()


@pytest.mark.slow
async def test_schedulers_are_replaced_and_killed_under_load(tmp_path: Path):
    settings = {"TEST_PACE": str(tmp_path), "DRAIN_TIMEOUT_S": "1"}
    async with running_fleet(tmp_path, settings, fork) as fleet:
        await start(fleet, scheduler=2, tokenizer=2, gateway=1)
        for _ in range(2):
            await fleet.start("worker", module="tests.mesh.paced_worker")
        await fleet.until_ready()
        (gateway,) = fleet.of("gateway")
        load = Load(NUM_STREAMS, 200, lambda number: gateway.url)
        await load.learn()
        running = asyncio.create_task(load.run())
        for old in fleet.of("scheduler"):
            await replace(fleet, old)
        await fleet.kill(fleet.of("scheduler")[0])
        goal = load.num_good + NUM_STREAMS
        while load.num_good < goal and not load.failures:
            await asyncio.sleep(0.02)
        load.is_over = True
        await running
        assert not load.failures, load.failures[:5]
        assert not load.differences
        await fleet.until_idle()

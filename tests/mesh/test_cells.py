"""Several schedulers, each with workers of its own."""

import asyncio
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.fleet import Fleet
from services.scheduler.cells import handover
from services.scheduler.service import SchedulerService
from services.worker import attachment
from shared.process.report import is_fit, make_report
from shared.wire.messages import State
from tests.mesh.mesh import TEXT, Mesh, ask, running_mesh
from tests.mesh.test_chain import client_of

LONG = [7] * 100


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


async def start(fleet: Fleet, **nums: int) -> None:
    for kind, num in nums.items():
        for _ in range(num):
            await fleet.start(kind)

"""Real processes under load, killed, stopped, scaled: no request is lost, doubled or changed."""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from benchmarks.harness.checked_load import Load, StreamError, body_of, stream
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from benchmarks.processes import num_descriptors
from tests.mesh.forks import fork

SETTINGS = {
    "DTYPE": "float32",
    "MAX_MODEL_LEN": "512",
    "MAX_LOGPROBS": "-1",
    "DRAIN_TIMEOUT_S": "10",
}
NUM_STREAMS = 32
MAX_SHARE_DIFFERENT = 0.001  # float32 sums in another order occasionally decide a near tie
MAX_GROWTH_BYTES = 48 << 20
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


def ready_urls(fleet: Fleet) -> list[str]:
    return [gateway.url for gateway in fleet.of("gateway")]


async def until_it_works(member: Member) -> None:
    while not (status := await member.status())["load"] and not status["num_steps"]:
        await asyncio.sleep(0.05)


@asynccontextmanager
async def loaded(fleet: Fleet, load: Load):
    """Clients at work, and a check at their end."""
    running = asyncio.create_task(load.run())
    try:
        yield
    finally:
        load.is_over = True
        await running
    assert not load.failures, load.failures[:5]
    assert load.num_good > 0
    num_allowed = max(1, int(MAX_SHARE_DIFFERENT * load.num_good))
    assert len(load.differences) <= num_allowed, load.differences
    await fleet.until_idle()


async def progress(load: Load, num: int) -> None:
    """Waits until this number of further requests has succeeded."""
    goal = load.num_good + num
    async with asyncio.timeout(90):
        while load.num_good < goal:
            assert not load.failures, load.failures[:5]
            await asyncio.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_services_are_killed_in_turn_and_no_request_is_lost_or_changed(tmp_path: Path):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=2, tokenizer=2, gateway=2)
        steady, fragile = fleet.of("gateway")
        urls = [steady.url, fragile.url]
        load = Load(NUM_STREAMS, 48, lambda number: urls[number % 8 == 7])
        await load.learn()
        before = (0, 0)
        async with loaded(fleet, load):
            for turn in range(20):
                for kind in ("worker", "tokenizer", "scheduler", "gateway"):
                    await progress(load, NUM_STREAMS // 2)
                    victim = fleet.of(kind)[-1]
                    load.lost_urls |= {victim.url} if kind == "gateway" else set()
                    await fleet.kill(victim)
                    successor = await fleet.start(kind)
                    if kind == "gateway":
                        urls[1] = steady.url
                        await successor.until_ready()
                        urls[1] = successor.url
                if turn == 0:
                    before = num_descriptors(steady.process.pid), steady.resident_bytes
            await fleet.until_ready()
            await progress(load, NUM_STREAMS)
            after = num_descriptors(steady.process.pid), steady.resident_bytes
        assert after[0] - before[0] <= NUM_STREAMS, "descriptors of clients come and go, no others"
        assert after[1] - before[1] < MAX_GROWTH_BYTES


@pytest.mark.slow
async def test_two_hundred_streams_each_end_once_and_leave_nothing(tmp_path: Path):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=2, tokenizer=2, gateway=2)
        urls = ready_urls(fleet)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as session:
            bodies = [body_of(number, 24) for number in range(200)]
            texts = await asyncio.gather(
                *(stream(session, urls[number % 2], body) for number, body in enumerate(bodies))
            )
        assert all(texts)
        await fleet.until_idle()
        for member in fleet.of("worker") + fleet.of("tokenizer"):
            assert (await member.status())["num_steps"] > 0, "every worker had work"


@pytest.mark.slow
async def test_the_blocks_of_clients_that_leave_are_free_soon(tmp_path: Path):
    """For a running stream, then for a request that waits for it."""
    settings = SETTINGS | {"MAX_MODEL_LEN": "2048", "MAX_NUM_SEQS": "1"}
    async with running_fleet(tmp_path, settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        (url,), (scheduler,) = ready_urls(fleet), fleet.of("scheduler")
        async with aiohttp.ClientSession() as session:
            for num_waiting in (0, 1):
                bodies = [body_of(number, 2000) for number in range(1 + num_waiting)]
                streams = [asyncio.create_task(stream(session, url, body)) for body in bodies]
                there: tuple[float, float] = (0, 0)
                async with asyncio.timeout(30):
                    while there != (1, num_waiting):
                        metrics = await scheduler.metrics()
                        there = (metrics[RUNNING], metrics[WAITING])
                for each in streams:
                    each.cancel()
                async with asyncio.timeout(10):
                    await fleet.until_idle()


@pytest.mark.slow
@pytest.mark.parametrize("num_streams", [NUM_STREAMS // 2, NUM_STREAMS])
async def test_replicas_come_and_go_under_load_without_a_failed_request(
    tmp_path: Path, num_streams: int
):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        urls = ready_urls(fleet)
        load = Load(num_streams, 32, lambda number: urls[number % len(urls)])
        await load.learn()
        async with loaded(fleet, load):
            for kind in ("gateway", "tokenizer", "worker"):
                first = fleet.of(kind)[0]
                added = [await fleet.start(kind) for _ in range(2)]
                for member in added:
                    await member.until_ready()
                urls[:] = ready_urls(fleet)
                await progress(load, num_streams)
                async with asyncio.timeout(60):
                    for member in added:
                        await until_it_works(member)
                urls[:] = [added[1].url] if kind == "gateway" else urls
                for member in (first, added[0]):
                    assert await fleet.stop(member) == 0
                await progress(load, num_streams)


@pytest.mark.slow
async def test_a_poisoned_request_takes_two_workers_and_no_other_request(tmp_path: Path):
    poison = 4242
    async with running_fleet(tmp_path, {**SETTINGS, "TEST_POISON": str(poison)}, fork) as fleet:
        for kind in ("scheduler", "tokenizer", "gateway"):
            await fleet.start(kind)
        workers = [
            await fleet.start("worker", module="tests.mesh.poisoned_worker") for _ in range(3)
        ]
        await fleet.until_ready()
        (url,) = ready_urls(fleet)
        load = Load(8, 40, lambda number: url)
        await load.learn()
        async with loaded(fleet, load), aiohttp.ClientSession() as session:
            body = {"prompt": [5, poison], "max_tokens": 3}
            headers = {"X-Request-Id": "poisoned-one"}
            answer = await session.post(f"{url}/v1/completions", json=body, headers=headers)
            assert answer.status == 500
            assert answer.headers["X-Request-Id"] == "poisoned-one"
            assert "workers died" in (await answer.json())["error"]["message"]
            for _ in range(3):
                answer = await session.post(f"{url}/v1/completions", json=body)
                assert answer.status == 400
                assert (await answer.json())["error"]["code"] == "quarantined"
            await progress(load, 8)
        dead = [worker for worker in workers if worker.process.returncode is not None]
        assert len(dead) == 2


@pytest.mark.slow
async def test_a_request_that_breaks_tokenizers_takes_three_and_no_more(tmp_path: Path):
    """They end by themselves, not on purpose."""
    poison = 4242
    async with running_fleet(tmp_path, {**SETTINGS, "TEST_POISON": str(poison)}, fork) as fleet:
        for kind in ("scheduler", "worker", "gateway"):
            await fleet.start(kind)
        tokenizers = [
            await fleet.start("tokenizer", module="tests.mesh.breaking_tokenizer") for _ in range(4)
        ]
        await fleet.until_ready()
        (url,) = ready_urls(fleet)
        async with aiohttp.ClientSession() as session:
            body = {"prompt": [5, poison], "max_tokens": 3}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 500
                assert (await response.json())["error"]["code"] == "too_many_replays"
            async with asyncio.timeout(60):
                while len(fleet.of("tokenizer")) > 1:
                    await asyncio.sleep(0.05)
            assert await stream(session, url, body_of(0, 24))
        codes = [tokenizer.process.returncode for tokenizer in tokenizers]
        assert sorted(codes, key=str) == [1, 1, 1, None]


@pytest.mark.slow
async def test_requests_that_are_refused_fail_no_other(tmp_path: Path):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        (url,) = ready_urls(fleet)
        load = Load(4, 24, lambda number: url)
        await load.learn()
        async with loaded(fleet, load), aiohttp.ClientSession() as session:
            bad: tuple[dict[str, object], ...] = (
                {"prompt": [9000]},
                {"prompt": "x" * 100_000},
                {"prompt": []},
                {},
            )
            for body in bad:
                with pytest.raises(StreamError, match=r"^400"):
                    await stream(session, url, body)

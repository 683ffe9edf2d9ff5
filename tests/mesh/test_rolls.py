"""Every tier is replaced on purpose, one process after another, under open streams."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.harness.checked_load import Load
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from tests.mesh.forks import fork

MODULES = {"worker": "tests.mesh.paced_worker"}
SETTINGS = {"DRAIN_TIMEOUT_S": "1", "REPLAY_S": "120", "READY_WAIT_S": "120"}
GATEWAY = {"DRAIN_TIMEOUT_S": "50"}  # its open streams end before
NUM_STREAMS = 8
TIERS = ("worker", "tokenizer", "scheduler", "gateway")
WITHOUT_TOKENS = ("worker", "worker", "tokenizer", "scheduler", "tokenizer")


async def start(fleet: Fleet, kind: str) -> Member:
    own = GATEWAY if kind == "gateway" else {}
    return await fleet.start(kind, MODULES.get(kind, ""), **own)


async def replace(fleet: Fleet, kind: str, urls: list[str]) -> None:
    """Replaces the newest of its kind like an upgrade: its successor starts before it is
    stopped."""
    old = fleet.of(kind)[-1]
    new = await start(fleet, kind)
    if kind == "scheduler":
        while "state" not in await new.status():
            await asyncio.sleep(0.05)
    else:
        await new.until_ready()
    if kind == "gateway":
        urls[:] = [new.url]
    assert await fleet.stop(old) == 0
    await fleet.until_ready()


async def replace_without_a_token(fleet: Fleet, hold: Path) -> None:
    """More services leave between two tokens than may die."""
    hold.touch()
    for kind in WITHOUT_TOKENS:
        await replace(fleet, kind, [])
    for tokenizer in fleet.of("tokenizer"):
        assert (await tokenizer.metrics())["shoal_decoded_tokens_total"] == 0
    hold.unlink()


@pytest.mark.slow
async def test_each_tier_is_rolled_under_open_streams_and_no_stream_notices(tmp_path: Path):
    """A stream that ended before the last roll, or is still open long after, would prove
    nothing."""
    hold, slow = tmp_path / "hold", tmp_path / "slow"
    async with running_fleet(tmp_path, SETTINGS | {"TEST_PACE": str(tmp_path)}, fork) as fleet:
        for kind in ("scheduler", "worker", "tokenizer", "gateway", "gateway"):
            await start(fleet, kind)
        await fleet.until_ready()
        steady, other = fleet.of("gateway")
        urls = [other.url]
        through = Load(NUM_STREAMS, 900, lambda number: steady.url)
        beside = Load(NUM_STREAMS, 16, lambda number: urls[0])
        await through.learn()
        await beside.learn()
        slow.touch()
        async with asyncio.TaskGroup() as tasks:
            for load in (through, beside):
                tasks.create_task(load.run())
            await asyncio.sleep(1)
            for kind in TIERS:
                await replace(fleet, kind, urls)
            await replace_without_a_token(fleet, hold)
            num_early = through.num_good
            through.is_over = beside.is_over = True
            slow.unlink()
        for load in (through, beside):
            assert not load.failures, load.failures[:5]
            assert not load.differences
        assert num_early == 0
        assert through.num_good == NUM_STREAMS
        await fleet.until_idle()

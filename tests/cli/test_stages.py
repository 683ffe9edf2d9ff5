"""A worker of two stages as a user starts it, and streams after the loss of one."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from tests.cli.serving import is_alive, serving
from tests.cli.test_ranks import lose, rank_of, text_of

ALONE = ("--dtype", "float32", "--max-model-len", "1024")
FLAGS = ("--pipeline-parallel-size", "2", *ALONE)
NUM_STREAMS = 8
STEPS, AHEAD = "shoal_worker_stage_steps_total", "shoal_worker_stage_steps_ahead_total"


@pytest.mark.slow
async def test_streams_outlive_a_stage_that_is_killed(tmp_path: Path) -> None:
    async with serving(tmp_path / "alone", *ALONE) as alone:
        await alone.until_ready()
        text = await text_of(alone)
    async with serving(tmp_path, *FLAGS) as shoal:
        await shoal.until_ready()
        assert await asyncio.gather(*(text_of(shoal) for _ in range(NUM_STREAMS))) == (
            [text] * NUM_STREAMS
        )
        counted = await shoal.metrics("worker")
        assert counted[STEPS] > counted[AHEAD] > 0, "both stages worked at a time"
        second = rank_of(shoal, 1)
        assert second is not None
        begun = asyncio.Event()
        running = [asyncio.create_task(text_of(shoal, begun)) for _ in range(NUM_STREAMS)]
        await begun.wait()
        os.kill(second, signal.SIGKILL)
        assert await asyncio.gather(*running) == [text] * NUM_STREAMS
        assert not is_alive(second)
        assert rank_of(shoal, 1) not in (None, second)


@pytest.mark.slow
async def test_a_stream_outlives_stages_that_stand_still_and_the_first_one(tmp_path: Path) -> None:
    async with serving(tmp_path, *FLAGS) as shoal:
        await shoal.until_ready()
        text = await text_of(shoal)
        await lose(shoal, signal.SIGSTOP, 1, text)
        await lose(shoal, signal.SIGKILL, 0, text)
        await lose(shoal, signal.SIGSTOP, 0, text)


@pytest.mark.slow
async def test_more_stages_than_cores_or_layers_are_refused_at_the_start(tmp_path: Path) -> None:
    async with serving(tmp_path, "--pipeline-parallel-size", "64") as shoal:
        assert await asyncio.wait_for(shoal.process.wait(), 60) == 2
    assert "pipeline-parallel-size: 64 " in "\n".join(shoal.lines)

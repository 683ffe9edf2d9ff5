"""Streams of a leaving worker, seen by clients: they go on at another one with their blocks."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

from benchmarks.processes import workers_of
from tests.cli.serving import serving

pytestmark = pytest.mark.timeout(600)

NUM_STREAMS, PROMPT_LEN, REPLY_LEN = 4, 160, 240
FLAGS = (
    *("--workers", "2", "--max-model-len", "1024", "--num-gpu-blocks-override", "200"),
    *("--speculative-config", '{"method": "none"}', "--dtype", "float32"),
)
DONE = 'shoal_moves_total{outcome="done",why="leaving"}'
RECOMPUTED = 'shoal_recomputed_tokens_total{why="moved"}'


async def stream(client: AsyncOpenAI, prompt: list[int], ids: list[int]) -> None:
    """Adds to ``ids`` as they come."""
    chunks: Any = await client.completions.create(
        model="shoal-tiny", prompt=prompt, max_tokens=REPLY_LEN, temperature=0, stream=True,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )  # fmt: skip
    async for chunk in chunks:
        for choice in chunk.choices:
            ids += getattr(choice, "token_ids", None) or []


async def test_streams_of_a_stopped_worker_move_with_their_blocks(tmp_path: Path) -> None:
    """With the texts of undisturbed streams, and no token of a prompt is computed again."""
    prompts = [
        np.random.default_rng(seed).integers(300, 8000, PROMPT_LEN).tolist()
        for seed in range(NUM_STREAMS)
    ]
    found, wanted = ([list[int]() for _ in prompts] for _ in range(2))
    async with serving(tmp_path / "mesh", *FLAGS) as served:
        await served.until_ready()
        async with served.client() as client:
            streams = [
                asyncio.create_task(stream(client, prompt, ids))
                for prompt, ids in zip(prompts, found, strict=True)
            ]
            async with asyncio.timeout(60):
                while min(map(len, found)) < 20:
                    await asyncio.sleep(0.01)
            os.kill(workers_of(served.directory)[0], signal.SIGTERM)
            await asyncio.gather(*streams)
            metrics = await served.metrics("scheduler")
            for prompt, ids in zip(prompts, wanted, strict=True):
                await stream(client, prompt, ids)
    assert found == wanted
    assert metrics[DONE] > 0
    assert metrics[RECOMPUTED] == 0

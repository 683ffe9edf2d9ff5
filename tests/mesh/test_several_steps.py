"""The embedded model's steps are short, so plans have several: the outputs of real processes equal
those of single steps, though a client leaves."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.harness.fleet import Fleet, running_fleet
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.mesh.forks import fork

SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "1024", "NUM_THREADS": "1"}
PROMPTS = ("import asyncio\n\n\nasync def main() -> None:\n    ", "The scheduler")
NUM_TOKENS = 400


def single_steps() -> list[list[int]]:
    """The ids after ``PROMPTS`` with one step per plan."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine = make_engine(EMBEDDED_MODEL, "native", max_model_len=1024)
    ids = [tokenizer.encode(prompt).ids for prompt in PROMPTS]
    return scheduled.run(engine, ids, params, num_steps=1).texts


async def stream(session: aiohttp.ClientSession, prompt: str) -> AsyncGenerator[list[int], None]:
    """The ids of each event."""
    body = {
        "prompt": prompt,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    async with session.post("/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                event: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
                yield event["choices"][0]["token_ids"]


async def text_of(session: aiohttp.ClientSession, prompt: str) -> list[int]:
    return [token for ids in [each async for each in stream(session, prompt)] for token in ids]


async def started(fleet: Fleet) -> aiohttp.ClientSession:
    await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
    (gateway,) = fleet.of("gateway")
    return aiohttp.ClientSession(gateway.url)


@pytest.mark.slow
async def test_texts_are_those_of_single_steps_and_take_fewer_plans(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet, await started(fleet) as session:
        texts = await asyncio.gather(*(text_of(session, prompt) for prompt in PROMPTS))
        assert texts == single_steps()
        await fleet.until_idle()
        (worker,) = fleet.of("worker")
        (scheduler,) = fleet.of("scheduler")
        num_steps, metrics = 0.0, await scheduler.metrics()
        async with asyncio.timeout(20):  # the last, empty plan may be in flight
            while num_steps != metrics["shoal_step_seconds_count"]:
                num_steps = (await worker.metrics())["shoal_steps_total"]
                metrics = await scheduler.metrics()
        # A slow machine has few plans of several steps.
        assert num_steps > metrics["shoal_plan_seconds_count"]


@pytest.mark.slow
async def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet, await started(fleet) as session:
        staying = asyncio.create_task(text_of(session, PROMPTS[0]))
        num = 0
        async with aclosing(stream(session, PROMPTS[1])) as leaving:
            async for ids in leaving:
                num += len(ids)
                if num > NUM_TOKENS / 10:
                    break
        assert await staying == single_steps()[0]
        await fleet.until_idle()

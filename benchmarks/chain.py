"""The mesh's overhead per step and until the first token.

One stream at a time runs through four processes and HTTP, in turns with the same scheduler core and
engine called in one loop in this process; both with the embedded model. Client, gateway, tokenizer,
scheduler and worker share the machine's cores. With one plan in flight steps never overlap, so the
full message round trip is visible.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness.fleet import running_fleet
from benchmarks.report import spread, write
from cli.bench.engine_loop import EngineLoop, Job
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig

PROMPT = "import asyncio\n\n\nasync def main() -> None:\n    "
NUM_TOKENS = 200
CHAINS = {
    "chain, one plan in flight": {"PIPELINE_DEPTH": "1"},
    "chain, two plans in flight": {"PIPELINE_DEPTH": "2"},
}


class Loop:
    """Scheduler core and engine, without sockets."""

    def __init__(self, num_threads: int) -> None:
        self._loop = EngineLoop(WorkerConfig(num_threads=num_threads))
        tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
        self._job = Job(np.array(tokenizer.encode(PROMPT).ids, np.int32), NUM_TOKENS)

    def run(self) -> tuple[float, float]:
        """Seconds to the first token, and mean seconds per later token."""
        steps = self._loop.run([self._job], 1, None)
        first_s, *later_s = [step.engine_s + step.scheduling_s for step in steps]
        return first_s, sum(later_s) / (NUM_TOKENS - 1)


async def run_chain(session: aiohttp.ClientSession) -> tuple[float, float]:
    """The same, measured by an HTTP client."""
    body = {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    times_s = [time.perf_counter()]
    async with session.post("/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                now_s = time.perf_counter()
                num = len(json.loads(line[6:])["choices"][0]["token_ids"])
                times_s += [now_s] * num
    if len(times_s) != NUM_TOKENS + 1:
        raise RuntimeError(f"{len(times_s) - 1} tokens came, not {NUM_TOKENS}")
    started_s, first_s, *_, last_s = times_s
    return first_s - started_s, (last_s - first_s) / (len(times_s) - 2)


async def measure(num_rounds: int, num_threads: int) -> dict[str, Any]:
    loop = Loop(num_threads)
    runs: dict[str, list[tuple[float, float]]] = {"loop": [], **{name: [] for name in CHAINS}}
    async with AsyncExitStack() as stack:
        settings = {"NUM_THREADS": str(num_threads), "ENABLE_PREFIX_CACHING": "false"}
        sessions = {name: await start(stack, settings | own) for name, own in CHAINS.items()}
        for number in range(num_rounds + 1):
            for name, session in sessions.items():
                runs[name].append(await run_chain(session))
            runs["loop"].append(loop.run())
            if number == 0:
                for each in runs.values():
                    each.clear()  # the first runs are warm-up
    return {name: _figures(each, runs["loop"]) for name, each in runs.items()}


async def measure_both(num_rounds: int) -> dict[str, Any]:
    """With one core left free by the worker, and with none."""
    num_cores = len(os.sched_getaffinity(0))
    return {
        f"{num} threads on {num_cores} cores": await measure(num_rounds, num)
        for num in (max(1, num_cores - 1), num_cores)
    }


async def start(stack: AsyncExitStack, settings: dict[str, str]) -> aiohttp.ClientSession:
    """Starts four processes; yields a client session of their gateway."""
    directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    fleet = await stack.enter_async_context(running_fleet(directory, settings))
    await fleet.start_all(scheduler=1, tokenizer=1, worker=1, gateway=1)
    (gateway,) = fleet.of("gateway")
    return await stack.enter_async_context(aiohttp.ClientSession(gateway.url))


def _figures(runs: list[tuple[float, float]], loop: list[tuple[float, float]]) -> dict[str, Any]:
    """Figures relative to the loop's runs in the same round."""
    pairs = list(zip(runs, loop, strict=True))
    return {
        "us per step": _us(step for _, step in runs),
        "us per step, more than the loop": _us(own[1] - other[1] for own, other in pairs),
        "step, ratio to the loop": spread([own[1] / other[1] for own, other in pairs]),
        "us to the first token": _us(first for first, _ in runs),
        "us to the first token, more than the loop": _us(own[0] - other[0] for own, other in pairs),
    }


def _us(seconds: Any) -> dict[str, float]:
    return spread([each * 1e6 for each in seconds])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    write("chain", asyncio.run(measure_both(parser.parse_args().rounds)))

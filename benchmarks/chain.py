"""What does the mesh add to a step and to the first token?

One stream at a time through four processes and HTTP, against the same scheduler core and the same
engine called in one loop in this process; both with the embedded model, in turns. Client, gateway,
tokenizer, scheduler and worker share the machine's cores. Two steps never overlap (one plan in
flight), so what the chain takes for a message there and back shows in full.
"""

import argparse
import asyncio
import json
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
from tokenizers import Tokenizer

from benchmarks.report import spread, write
from services.scheduler.scheduler import Scheduler
from services.worker.engine import Engine
from shared.config import EMBEDDED_MODEL, WorkerConfig
from shared.messages import WINDOW_BYTES, Generate, Grant, SamplingParams
from tests.mesh.fleet import running_fleet

PROMPT = "import asyncio\n\n\nasync def main() -> None:\n    "
NUM_TOKENS = 200
WORKER = "worker"


class Loop:
    """Scheduler core and engine, without sockets."""

    def __init__(self) -> None:
        self._engine = Engine(WorkerConfig(), lambda text, fraction: None)
        self._core = Scheduler(max_waiting=1, priority_step_s=10)
        self._core.add_worker(WORKER, self._engine.capacity)
        tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
        self._ids = np.array(tokenizer.encode(PROMPT).ids, np.int32)
        self._num_runs = 0

    def run(self) -> tuple[float, float]:
        """Seconds to the first token, and of a later step (median)."""
        self._num_runs += 1
        name, num_ids = str(self._num_runs), len(self._ids)
        params = SamplingParams(0, temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        started_s = time.perf_counter()
        self._core.add(Generate(name, 1, 0, num_ids, params), self._ids, 0, started_s)
        self._core.grant(Grant(name, 1, NUM_TOKENS, WINDOW_BYTES))
        times_s = [started_s]
        while self._core.sequences:
            planned = self._core.plan(WORKER)
            assert planned is not None
            result, arrays = self._engine.step(planned.plan, planned.ids)
            self._core.absorb(WORKER, result, arrays)
            times_s.append(time.perf_counter())
        return _first_and_later(times_s)


async def run_chain(session: aiohttp.ClientSession) -> tuple[float, float]:
    """The same, as a client sees it."""
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
    return _first_and_later(times_s)


def _first_and_later(times_s: list[float]) -> tuple[float, float]:
    first_s, *later_s = (after_s - before_s for before_s, after_s in pairwise(times_s))
    return first_s, median(later_s)


async def measure(num_rounds: int) -> dict[str, Any]:
    loop = Loop()
    chain_runs, loop_runs = [], []
    with tempfile.TemporaryDirectory() as directory:
        async with running_fleet(Path(directory), {}) as fleet:
            await fleet.start_all(scheduler=1, tokenizer=1, worker=1, gateway=1)
            (gateway,) = fleet.of("gateway")
            async with aiohttp.ClientSession(gateway.url) as session:
                await run_chain(session)
                loop.run()
                for _ in range(num_rounds):
                    chain_runs.append(await run_chain(session))
                    loop_runs.append(loop.run())
    added = [
        (chain_first - loop_first, chain_step - loop_step)
        for (chain_first, chain_step), (loop_first, loop_step) in zip(
            chain_runs, loop_runs, strict=True
        )
    ]
    return {
        "chain, us per step": _us(step for _, step in chain_runs),
        "loop, us per step": _us(step for _, step in loop_runs),
        "added by the chain, us per step": _us(step for _, step in added),
        "chain, us to the first token": _us(first for first, _ in chain_runs),
        "loop, us to the first token": _us(first for first, _ in loop_runs),
        "added by the chain, us to the first token": _us(first for first, _ in added),
        "chain / loop, step": round(
            median(step for _, step in chain_runs) / median(step for _, step in loop_runs), 3
        ),
    }


def _us(seconds: Any) -> dict[str, float]:
    return spread([each * 1e6 for each in seconds])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    write("chain", asyncio.run(measure(parser.parse_args().rounds)))

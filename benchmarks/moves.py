"""Sequences that move between workers: the pause of streams whose worker leaves, and streams next
to long prompts, with workers for prompts alone.

*Leaving*: one of two workers is told to leave under streams; with moves and without, in turns.
*Roles*: three workers, all for both or one for prompts; streams run, then long prompts come.
*Peer hits*: the prefix of a prompt is in the cache of a busy worker; the other one fetches or
computes it.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.report import spread, write

SIZE = "small"
NUM_STREAMS, PROMPT_LEN, REPLY_LEN = 12, 1500, 400
NUM_BURST, BURST_LEN = 8, 3000
NUM_PREFIXES, PREFIX_LEN, BUSY_LEN = 4, 4000, 80
LEAVES_AFTER = 32  # tokens of each stream
COUNTS = ("shoal_recomputed_tokens_total", "shoal_moves_total", "shoal_peer_hit_tokens_total")


class Streams:
    """Streams of random prompts; ``times_s`` of tokens, by stream."""

    def __init__(self, url: str, seed: int, num: int, prompt_len: int, reply_len: int) -> None:
        self._url, self._reply_len = url, reply_len
        rng = np.random.default_rng(seed)
        ids = rng.integers(10, SHAPES[SIZE]["vocab_size"], (num, prompt_len))
        self._prompts: list[list[int]] = ids.tolist()
        self.times_s: list[list[float]] = [[] for _ in range(num)]

    async def run(self) -> None:
        timeout = aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            await asyncio.gather(
                *(
                    self._stream(session, prompt, times)
                    for prompt, times in zip(self._prompts, self.times_s, strict=True)
                )
            )

    async def until_begun(self, num_tokens: int) -> None:
        while min(map(len, self.times_s)) < num_tokens:
            await asyncio.sleep(0.01)

    def gaps_ms(self, start_s: float, end_s: float = float("inf")) -> list[np.ndarray]:
        """Of each stream, between tokens from ``start_s`` to ``end_s``."""
        found = (
            np.array([each for each in times if start_s <= each <= end_s]) for times in self.times_s
        )
        return [1e3 * np.diff(times) for times in found if len(times) > 1]

    async def _stream(
        self, session: aiohttp.ClientSession, prompt: list[int], times: list[float]
    ) -> None:
        body = {
            "model": checkpoint(SIZE).name,
            "prompt": prompt,
            "max_tokens": self._reply_len,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(f"{self._url}/v1/completions", json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter())


@asynccontextmanager
async def fleet_of(*roles: str, **settings: str) -> AsyncIterator[Fleet]:
    common = {
        "MODEL": str(checkpoint(SIZE)),
        "MAX_MODEL_LEN": "4096",
        "NUM_THREADS": "1",
        "DRAIN_TIMEOUT_S": "16",
    }
    with tempfile.TemporaryDirectory() as folder:
        async with running_fleet(Path(folder), common | settings) as fleet:
            for role in roles:
                await fleet.start("worker", WORKER_ROLE=role)
            await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
            await asyncio.sleep(1)  # all attach
            yield fleet


async def leaving(seed: int, kv_transfer: str) -> dict[str, float]:
    async with fleet_of("both", "both", KV_TRANSFER=kv_transfer) as fleet:
        streams = Streams(fleet.of("gateway")[0].url, seed, NUM_STREAMS, PROMPT_LEN, REPLY_LEN)
        running = asyncio.create_task(streams.run())
        await streams.until_begun(LEAVES_AFTER)
        started_s = time.perf_counter()
        await fleet.stop(fleet.of("worker")[0])
        leaves_s = time.perf_counter() - started_s
        await running
        found = await _counts(fleet)
    pauses = [float(gaps.max()) for gaps in streams.gaps_ms(started_s)]
    return {
        "longest pause, ms": max(pauses),
        "median of the longest pauses, ms": median(pauses),
        "seconds to leave": leaves_s,
        **found,
    }


async def roles(seed: int, *names: str) -> dict[str, float]:
    async with fleet_of(*names) as fleet:
        url = fleet.of("gateway")[0].url
        streams = Streams(url, seed, NUM_STREAMS // 2, 64, REPLY_LEN)
        running = asyncio.create_task(streams.run())
        await streams.until_begun(LEAVES_AFTER)
        burst = Streams(url, seed + 1000, NUM_BURST, BURST_LEN, 8)
        started_s = time.perf_counter()
        await burst.run()
        burst_s = time.perf_counter() - started_s
        await running
        found = await _counts(fleet)
    gaps = np.concatenate(streams.gaps_ms(started_s, started_s + burst_s))
    return {
        "gap, median, ms": float(np.median(gaps)),
        "gap, p99, ms": float(np.quantile(gaps, 0.99)),
        "longest gap, ms": float(gaps.max()),
        "seconds of the burst": burst_s,
        **found,
    }


async def peer_hits(seed: int, kv_transfer: str) -> dict[str, float]:
    first_s = []
    async with fleet_of("both", "both", KV_TRANSFER=kv_transfer, MAX_NUM_SEQS="1") as fleet:
        url = fleet.of("gateway")[0].url
        for number in range(NUM_PREFIXES):
            busy, new = (
                Streams(url, 10 * seed + number, 1, PREFIX_LEN, reply_len)
                for reply_len in (BUSY_LEN, 1)
            )
            running = asyncio.create_task(busy.run())
            await busy.until_begun(8)
            started_s = time.perf_counter()
            await new.run()
            first_s.append(new.times_s[0][0] - started_s)
            await running
        found = await _counts(fleet)
    return {"time to first token, ms": 1e3 * median(first_s), **found}


async def _counts(fleet: Fleet) -> dict[str, float]:
    metrics = await fleet.of("scheduler")[0].metrics()
    return {
        name: sum(value for key, value in metrics.items() if key.startswith(name))
        for name in COUNTS
    }


Runs = dict[str, Callable[[int], Awaitable[dict[str, float]]]]
MOVES: Runs = {
    "leaving, with moves": lambda seed: leaving(seed, "true"),
    "leaving, without": lambda seed: leaving(seed, "false"),
    "both, both, both": lambda seed: roles(seed, "both", "both", "both"),
    "prefill, decode, decode": lambda seed: roles(seed, "prefill", "decode", "decode"),
}
PEER_HITS: Runs = {
    "prefix fetched": lambda seed: peer_hits(seed, "true"),
    "prefix computed": lambda seed: peer_hits(seed, "false"),
}


async def measure(runs: Runs, num_rounds: int) -> dict[str, Any]:
    found: dict[str, list[dict[str, float]]] = {}
    for seed in range(num_rounds):
        for name, run in runs.items():
            found.setdefault(name, []).append(await run(seed))
    return {
        name: {key: spread([each[key] for each in rounds]) for key in rounds[0]}
        for name, rounds in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer-hits", action="store_true", help="measure these alone")
    given = parser.parse_args()
    runs = PEER_HITS if given.peer_hits else MOVES
    write("moves", uvloop.run(measure(runs, given.rounds)))


if __name__ == "__main__":
    main()

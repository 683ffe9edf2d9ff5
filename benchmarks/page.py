"""Cost of an open status page.

The same load, in turns, with and without a client that requests ``/v1/mesh`` once a second, as the
visible page does; with the embedded model. Ratios are between consecutive runs: CPU time of all
services per token, and tokens per second. On a shared machine equal runs differ by more than a page
costs, so CPU time per second is also measured without load. The browser's own cost is not included.
"""

import argparse
import asyncio
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks.front import cpu_s
from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.report import spread, write
from benchmarks.traces import Cost, run

PERIOD_S = 1.0  # as in services/gateway/page/mesh/mesh.js
LOADS = {  # concurrent streams, tokens of each, and streams one after another
    "8 streams of 1500 tokens": (8, 1500, 2),
    "200 streams of 300 tokens": (200, 300, 1),
}
IDLE_S = 10.0


@asynccontextmanager
async def looking(port: int, num_pages: int) -> AsyncIterator[None]:
    """Raises the error of a failed page."""

    async def look(session: aiohttp.ClientSession) -> None:
        while True:
            async with session.get(f"http://127.0.0.1:{port}/v1/mesh") as response:
                assert (await response.json())["services"]
            await asyncio.sleep(PERIOD_S)

    async with aiohttp.ClientSession(raise_for_status=True) as session:
        pages = [asyncio.create_task(look(session)) for _ in range(num_pages)]
        try:
            yield
        finally:
            for page in pages:
                page.cancel()
            for ended in await asyncio.gather(*pages, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


async def measure(num_rounds: int, num_pages: int) -> dict[str, Any]:
    runs: dict[str, list[tuple[Cost, Cost]]] = defaultdict(list)
    idle: dict[int, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        async with running_fleet(Path(directory), {"MAX_NUM_SEQS": "256"}) as fleet:
            await fleet.start_all(worker=1, scheduler=1, tokenizer=1)
            gateway = await fleet.start("gateway")
            await fleet.until_ready()
            await run(fleet, gateway, (16, 150, 2))
            for number in range(num_rounds):
                turns = (0, num_pages) if number % 2 else (num_pages, 0)
                for name, load in LOADS.items():
                    costs = {}
                    for pages in turns:
                        async with looking(gateway.port, pages):
                            costs[pages] = await run(fleet, gateway, load)
                    runs[name].append((costs[num_pages], costs[0]))
                for pages in turns:
                    async with looking(gateway.port, pages):
                        idle[pages].append(await _idle_ms(fleet))
    return {name: _figures(pairs) for name, pairs in runs.items()} | {
        "nothing served": {
            "CPU ms a second, page open": spread(idle[num_pages]),
            "CPU ms a second, no page": spread(idle[0]),
        },
        "pages": num_pages,
    }


async def _idle_ms(fleet: Fleet) -> float:
    """CPU milliseconds of all services per second."""
    before_s = sum(map(cpu_s, fleet.members))
    await asyncio.sleep(IDLE_S)
    return 1e3 * (sum(map(cpu_s, fleet.members)) - before_s) / IDLE_S


def _figures(pairs: list[tuple[Cost, Cost]]) -> dict[str, Any]:
    return {
        "tokens/s, page open": spread([1 / opened[1] for opened, _ in pairs]),
        "tokens/s, no page": spread([1 / closed[1] for _, closed in pairs]),
        "CPU, ratio": spread([opened[0] / closed[0] for opened, closed in pairs]),
        "tokens/s, ratio": spread([closed[1] / opened[1] for opened, closed in pairs]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--pages", type=int, default=1)
    options = parser.parse_args()
    write("page", asyncio.run(measure(options.rounds, options.pages)))

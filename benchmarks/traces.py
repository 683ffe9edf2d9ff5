"""Cost of tracing.

Two gateways of one mesh, one with a trace of every request and one with none, are loaded in turns:
with the embedded model, for the cost to a server of a very small model, and with a worker of
instant steps, so that nothing hides the services' own work. Long streams show the cost of a step,
short ones that of a request. Ratios are between consecutive runs: CPU time of all services per
token, and tokens per second.
"""

import argparse
import asyncio
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.front import cpu_s, stream
from benchmarks.harness.fleet import Fleet, Member, running_fleet
from benchmarks.report import spread, write

KINDS = ("tokenizer", "scheduler", "worker")  # shared by both gateways
MODEL_LOADS = {"embedded model, 8 streams of 128 tokens": (8, 128, 2)}
LOADS = {  # concurrent streams, tokens of each, and streams one after another
    "1 stream of 1900 tokens": (1, 1900, 4),
    "64 streams of 600 tokens": (64, 600, 2),
    "256 streams of 150 tokens": (256, 150, 3),
    "64 streams of 16 tokens, 32 in a row": (64, 16, 32),
}
Cost = tuple[float, float]  # CPU seconds and seconds, per token


async def run(fleet: Fleet, gateway: Member, load: tuple[int, int, int]) -> Cost:
    num_streams, num_tokens, num_rounds = load
    members = [gateway, *(fleet.of(kind)[0] for kind in KINDS)]
    before_s, started_s = sum(map(cpu_s, members)), time.perf_counter()

    async def client() -> None:
        for _ in range(num_rounds):
            await stream(gateway.port, num_tokens)

    await asyncio.gather(*(client() for _ in range(num_streams)))
    num = num_streams * num_tokens * num_rounds
    return (sum(map(cpu_s, members)) - before_s) / num, (time.perf_counter() - started_s) / num


async def measure(num_rounds: int) -> dict[str, Any]:
    with_model = await measure_loads(num_rounds, MODEL_LOADS, "services.worker")
    return with_model | await measure_loads(num_rounds, LOADS, "benchmarks.fake_worker")


async def measure_loads(
    num_rounds: int, loads: dict[str, tuple[int, int, int]], worker: str
) -> dict[str, Any]:
    """``worker`` is the module of the worker."""
    runs: dict[str, list[tuple[Cost, Cost]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        async with running_fleet(Path(directory), {"MAX_NUM_SEQS": "256"}) as fleet:
            await fleet.start("worker", module=worker)
            await fleet.start_all(scheduler=1, tokenizer=1)
            traced = await fleet.start("gateway")
            untraced = await fleet.start("gateway", TRACE_STORE_BYTES="0")
            await fleet.until_ready()
            for gateway in (traced, untraced):
                await run(fleet, gateway, (16, 150, 2))
            for number in range(num_rounds):
                for name, load in loads.items():
                    costs = {}
                    for gateway in (traced, untraced) if number % 2 else (untraced, traced):
                        costs[gateway] = await run(fleet, gateway, load)
                    runs[name].append((costs[traced], costs[untraced]))
    return {name: _figures(pairs) for name, pairs in runs.items()}


def _figures(pairs: list[tuple[Cost, Cost]]) -> dict[str, Any]:
    return {
        "CPU us/token, traced": spread([1e6 * traced[0] for traced, _ in pairs]),
        "CPU us/token, untraced": spread([1e6 * untraced[0] for _, untraced in pairs]),
        "CPU, ratio": spread([traced[0] / untraced[0] for traced, untraced in pairs]),
        "tokens/s, ratio": spread([untraced[1] / traced[1] for traced, untraced in pairs]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    write("traces", asyncio.run(measure(parser.parse_args().rounds)))

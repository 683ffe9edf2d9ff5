"""What a step costs a scheduler that is a process, beside the same step in virtual time."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.front import cpu_s, stream
from benchmarks.harness.fleet import Fleet, running_fleet
from benchmarks.report import spread

NUMS_WORKERS = (1, 2, 4)
NUM_ROUNDS = 3
MAX_TOKENS = 1000  # of each stream

Simulated = Callable[[int, int], dict[str, Any]]


async def run(fleet: Fleet, num_streams: int) -> tuple[float, float]:
    """CPU microseconds of the scheduler for a step, and the sequences of a step."""
    (scheduler,), (gateway,) = fleet.of("scheduler"), fleet.of("gateway")
    cpu_before_s, before = cpu_s(scheduler), await scheduler.metrics()
    await asyncio.gather(*(stream(gateway.port, MAX_TOKENS) for _ in range(num_streams)))
    after = await scheduler.metrics()
    num_steps = after["shoal_step_seconds_count"] - before["shoal_step_seconds_count"]
    seconds = cpu_s(scheduler) - cpu_before_s
    return 1e6 * seconds / num_steps, num_streams * MAX_TOKENS / num_steps


async def measure_mesh(simulated: Simulated) -> dict[str, Any]:
    """With workers whose steps take no time. ``simulated`` measures so many workers in virtual
    time, each of which runs so many sequences."""
    return {f"{num} workers": await _measure(num, simulated) for num in NUMS_WORKERS}


async def _measure(num_workers: int, simulated: Simulated) -> dict[str, Any]:
    num_running = 10
    with tempfile.TemporaryDirectory() as directory:
        async with running_fleet(Path(directory), {"MAX_NUM_SEQS": f"{num_running}"}) as fleet:
            for _ in range(num_workers):
                await fleet.start("worker", module="benchmarks.fake_worker")
            await fleet.start_all(scheduler=1, tokenizer=1, gateway=1)
            num_streams = num_workers * num_running
            runs = [await run(fleet, num_streams) for _ in range(NUM_ROUNDS + 1)][1:]
    real = spread([step_us for step_us, _ in runs])
    rows = spread([num for _, num in runs])
    alone_us = simulated(num_workers, max(1, round(rows["median"])))["CPU us/step"]
    return {
        "CPU us/step": real,
        "sequences/step": rows,
        "CPU us/step, simulated": alone_us,
        "ratio": round(real["median"] / alone_us, 2),
    }

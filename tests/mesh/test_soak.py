"""``shoal serve`` under random traffic, with too few KV blocks: nothing is left, memory is flat."""

import asyncio
import time
from pathlib import Path

import pytest

from tests.cli.serving import Serving, serving
from tests.mesh.soak import Held, Traffic

# So few blocks that sequences are preempted; one of max-model-len fits.
FLAGS = (
    *("--max-model-len", "512", "--num-gpu-blocks-override", "40"),
    *("--max-num-seqs", "12"),
)
NUM_CLIENTS = 10
SAMPLE_S = 0.25
EMPTY = {
    "gateway": ("shoal_open_requests", "shoal_buffered_bytes"),
    "tokenizer": ("shoal_open_requests",),
    "scheduler": ('shoal_kv_blocks{state="used"}', "shoal_kv_block_leak", "shoal_sequences"),
    "worker": ("shoal_worker_sequences",),
}


async def left_over(shoal: Serving) -> dict[str, float]:
    """Resources still held, by service and metric."""
    metrics = {service: await shoal.metrics(service) for service in EMPTY}
    return {
        f"{service} {name}": metrics[service][name]
        for service, names in EMPTY.items()
        for name in names
        if metrics[service][name]
    }


async def until_nothing_is_left(shoal: Serving) -> None:
    until_s = time.monotonic() + 20
    while left := await left_over(shoal):
        assert time.monotonic() < until_s, left
        await asyncio.sleep(0.1)


async def soak(directory: Path, duration_s: float, max_growth: float) -> None:
    async with serving(directory, *FLAGS) as shoal:
        await shoal.until_ready()
        held = Held({**shoal.children(), "serve": shoal.process.pid})
        traffic = Traffic(shoal.url, NUM_CLIENTS)
        running = asyncio.create_task(traffic.run())
        until_s = time.monotonic() + duration_s
        while time.monotonic() < until_s and not running.done():
            held.sample()
            await asyncio.sleep(SAMPLE_S)
        traffic.is_over = True
        await running
        await until_nothing_is_left(shoal)
        assert (await shoal.metrics("scheduler"))["vllm:num_preemptions_total"] > 0
        assert shoal.children() == {name: pid for name, pid in held.pids.items() if name != "serve"}
    assert all(traffic.ends[how] for how in ("streamed", "whole", "hung up", "refused"))
    growth = held.growth()
    assert max(growth.values()) < max_growth, (growth, traffic.ends)


@pytest.mark.slow
async def test_a_quarter_of_a_minute_of_anything_leaves_nothing(tmp_path: Path):
    await soak(tmp_path, 15, 0.05)


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_twenty_minutes_of_anything_leave_nothing(tmp_path: Path):
    await soak(tmp_path, 1200, 0.02)

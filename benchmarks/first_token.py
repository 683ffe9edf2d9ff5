"""Breakdown of the time to a first token.

Sends one short prompt at a time through four processes and HTTP, with the embedded model, and reads
each request's trace. All services run on one machine, so their spans share a clock. The gaps
between spans are messages in transit: packing, socket, wake-up.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from contextlib import AsyncExitStack
from typing import Any

import aiohttp

from benchmarks.chain import PROMPT, start
from benchmarks.report import write

NUM_WARM_UPS = 5
PAUSE_S = 0.05  # as between real requests: the services' CPU caches are cold
NUM_TOKENS = 40
WAYS = [
    ("HTTP to the gateway", "client sends", "gateway begins"),
    ("gateway: the request is read and checked", "gateway begins", "submitted"),
    ("to the tokenizer", "submitted", "tokenizer begins"),
    ("tokenizer: text to ids, on a thread", "tokenizer begins", "encoded"),
    ("to the scheduler", "encoded", "scheduler begins"),
    ("scheduler: until it has a slot", "scheduler begins", "planned"),
    ("to the worker and its step thread", "planned", "prefill begins"),
    ("worker: the prompt's step", "prefill begins", "prefill ends"),
    ("to the scheduler and the tokenizer", "prefill ends", "text begins"),
    ("to the gateway, and HTTP to the client", "text begins", "client reads"),
]


async def trace_one(session: aiohttp.ClientSession) -> dict[str, float]:
    """Event times in Unix time."""
    body = {"prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    moments = {"client sends": time.time()}
    async with session.post("/v1/completions", json=body | {"stream": True}) as response:
        name = response.headers["X-Request-Id"]
        async for line in response.content:
            if line.startswith(b"data: {"):
                moments.setdefault("client reads", time.time())
    await asyncio.sleep(PAUSE_S)
    async with session.get(f"/v1/traces/{name}") as response:
        spans = json.loads(await response.read())["spans"]
    found = {(each["service"]["role"], each["name"].split()[0]): each for each in reversed(spans)}
    for moment, service, span in [
        ("gateway begins", "gateway", "POST"),
        ("submitted", "gateway", "attempt"),
        ("tokenizer begins", "tokenizer", "prompt"),
        ("scheduler begins", "scheduler", "sequence"),
        ("planned", "scheduler", "run"),
        ("prefill begins", "worker", "prefill"),
        ("text begins", "tokenizer", "decode"),
    ]:
        moments[moment] = found[service, span]["start"]
    for moment, service, span in [
        ("encoded", "tokenizer", "encode"),
        ("prefill ends", "worker", "prefill"),
    ]:
        each = found[service, span]
        moments[moment] = each["start"] + each["duration_ms"] / 1000
    return moments


async def measure(num_requests: int, num_threads: int) -> dict[str, Any]:
    settings = {"NUM_THREADS": str(num_threads), "ENABLE_PREFIX_CACHING": "false"}
    async with AsyncExitStack() as stack:
        session = await start(stack, settings)
        traced = [await trace_one(session) for _ in range(NUM_WARM_UPS + num_requests)]
    whole = ("the first token", "client sends", "client reads")
    return {
        name: _us([each[end] - each[begin] for each in traced[NUM_WARM_UPS:]])
        for name, begin, end in [*WAYS, whole]
    }


def _us(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles in microseconds."""
    quarters = [round(1e6 * each) for each in statistics.quantiles(seconds, n=4)]
    return dict(
        zip(("first quarter, us", "median, us", "third quarter, us"), quarters, strict=True)
    )


async def measure_both(num_requests: int) -> dict[str, Any]:
    """With one core left free by the worker, and with none."""
    num_cores = len(os.sched_getaffinity(0))
    return {
        f"{num} threads on {num_cores} cores": await measure(num_requests, num)
        for num in (max(1, num_cores - 1), num_cores)
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60)
    write("first_token", asyncio.run(measure_both(parser.parse_args().requests)))

"""Isolation of an API key from a hostile one.

A whole server with the embedded model, a folder of batches and a store. Measures first tokens,
batches and responses in the background of one key, alone and next to a hostile key, in turns on the
same server; counts the key's stored responses at the end. Server, both clients and other work share
the machine's cores.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks import servers
from benchmarks.harness.hostile_key import KINDS
from benchmarks.harness.polite_key import PoliteKey
from benchmarks.report import write
from shared.model_folder import EMBEDDED_MODEL

POLITE, HOSTILE = "key-that-is-polite", "key-that-is-hostile"
NUM_STORED = 20
NUM_BATCH_LINES = 50
EVERY_S = 0.25
LEAD_S = 3.0  # until the hostile key has reached its limits
MAX_OPEN = 8  # requests of a key
MAX_OPEN_OF_BATCHES = 6  # fewer, so that no line of a batch is refused
STORE_BYTES = 32 << 20  # full after a few seconds


async def measure(duration_s: float, num_clients: int, kinds: list[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        server = servers.checkout(
            *("--model", str(EMBEDDED_MODEL), "--batch-dir", f"{folder}/batches"),
            *("--response-store", f"{folder}/store.db", "--api-key", f"{POLITE},{HOSTILE}"),
            *("--response-store-bytes", str(STORE_BYTES)),
            *("--max-open-requests-per-key", str(MAX_OPEN)),
            *("--max-open-batch-requests", str(MAX_OPEN_OF_BATCHES)),
        )
        headers = {"Authorization": f"Bearer {POLITE}"}
        async with (
            servers.running(server) as url,
            aiohttp.ClientSession(url, headers=headers) as session,
        ):
            polite = PoliteKey(session)
            stored = [await polite.store() for _ in range(NUM_STORED)]
            await _first_tokens(polite, 5)
            alone = await _turn(polite, duration_s)
            answers: dict[str, Any] = {}
            async with _hostile(url, num_clients, kinds, answers):
                beside = await _turn(polite, duration_s)
                lost = await polite.num_lost(stored)
    ratio = beside["ms to the first token"]["p99"] / alone["ms to the first token"]["p99"]
    return {
        "alone": alone,
        "beside the hostile key": beside,
        "p99 to the first token, beside / alone": round(ratio, 2),
        "stored responses that are lost": lost,
        "answers to the hostile key by status": answers,
    }


async def _turn(polite: PoliteKey, duration_s: float) -> dict[str, Any]:
    """First tokens while a batch and a response in the background run."""
    started_s = time.perf_counter()
    batch_id = await polite.start_batch(NUM_BATCH_LINES)
    response_id = await polite.store(background=True)
    async with asyncio.TaskGroup() as tasks:
        batch = tasks.create_task(_timed(polite.batch_at_end(batch_id)))
        response = tasks.create_task(_timed(polite.status_at_end(response_id)))
        times_ms, refused = await _first_tokens(polite, duration_s)
    if batch.result()[0]["request_counts"]["completed"] != NUM_BATCH_LINES:
        raise RuntimeError(f"the batch's final status is {batch.result()[0]}")
    return {
        "ms to the first token": {
            f"p{each}": round(float(np.percentile(times_ms, each)), 1) for each in (50, 90, 99)
        },
        "first tokens": len(times_ms),
        "refused": refused,
        "seconds of a batch": round(batch.result()[1], 2),
        "seconds of a response in the background": round(response.result()[1], 2),
        "status of that": response.result()[0],
        "seconds in all": round(time.perf_counter() - started_s, 1),
    }


async def _timed(work: Any) -> tuple[Any, float]:
    started_s = time.perf_counter()
    return await work, time.perf_counter() - started_s


async def _first_tokens(polite: PoliteKey, duration_s: float) -> tuple[list[float], int]:
    """Milliseconds to each, and the number of refused requests."""
    times_ms, refused = [], 0
    until_s = time.perf_counter() + duration_s
    while (started_s := time.perf_counter()) < until_s:
        try:
            times_ms.append(1000 * await polite.first_token_s())
        except aiohttp.ClientResponseError:
            refused += 1
        await asyncio.sleep(max(0.0, started_s + EVERY_S - time.perf_counter()))
    return times_ms, refused


@asynccontextmanager
async def _hostile(
    url: str, num_clients: int, kinds: list[str], answers: dict[str, Any]
) -> AsyncIterator[None]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.harness.hostile_key"),
        *(url, HOSTILE, str(num_clients), *kinds),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=servers.ROOT,
    )
    try:
        await asyncio.sleep(LEAD_S)
        yield
    finally:
        text, _ = await process.communicate(b"")  # closes its stdin
    if process.returncode:
        raise RuntimeError(f"the hostile client ended with {process.returncode}")
    answers |= json.loads(text)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="of each of the two turns")
    parser.add_argument("--clients", type=int, default=4, help="of each hostile kind of request")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    arguments = parser.parse_args()
    found = measure(arguments.seconds, arguments.clients, arguments.kinds)
    write("two_keys", uvloop.run(found))

"""The effect of a low-priority batch on interactive requests.

An interactive stream runs over HTTP against whole servers, in turns: alone, and next to a batch of
``/v1/batches`` that is cancelled at the end of the turn. One server has a slot for every open
request; another has fewer (``max-num-seqs``), so priority decides on the next free slot. Each runs
with the default ``later-priority-share`` and with a value that hardly holds anything back.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write

INPUT_LEN, OUTPUT_LEN = 128, 64
NUM_LINES = 20_000  # more than one turn can answer
FEW_SLOTS = 8
SLOTS = {"slots for all": [], f"{FEW_SLOTS} slots": ["--max-num-seqs", str(FEW_SLOTS)]}
SHARES = {"share 0.2": 0.2, "share 0.99": 0.99}
ALONE_S = 3.0  # the batch alone, in each turn
FIGURES = ("ttft_ms", "tpot_ms")
POLL_S = 0.1


def lines(vocab_size: int, seed: int) -> bytes:
    """Batch requests of the interactive requests' length."""
    dice = Random(seed)
    texts = []
    for number in range(NUM_LINES):
        prompt = [dice.randrange(256, vocab_size) for _ in range(INPUT_LEN)]
        body = {"prompt": prompt, "max_tokens": OUTPUT_LEN, "ignore_eos": True}
        line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        texts.append(json.dumps(line))
    return "\n".join(texts).encode()


class BatchClient:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def upload(self, data: bytes) -> str:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", data, filename="in.jsonl")
        file_id: str = (await self._ask("POST", "files", data=form))["id"]
        return file_id

    @asynccontextmanager
    async def running(self, file_id: str) -> AsyncIterator[str]:
        """The id of a batch that has answered some requests; cancels it at the end. Raises
        RuntimeError if it ends before."""
        body = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file_id}
        batch_id: str = (await self._ask("POST", "batches", json=body))["id"]
        while not await self.num_completed(batch_id):
            await asyncio.sleep(POLL_S)
        yield batch_id
        await self._ask("POST", f"batches/{batch_id}/cancel")
        while (await self._batch(batch_id))["status"] != "cancelled":
            await asyncio.sleep(POLL_S)

    async def tokens_per_s(self, batch_id: str) -> float:
        """Output tokens per second of the batch from now on."""
        before, started_s = await self.num_completed(batch_id), time.perf_counter()
        await asyncio.sleep(ALONE_S)
        num_done = await self.num_completed(batch_id) - before
        return num_done * OUTPUT_LEN / (time.perf_counter() - started_s)

    async def num_completed(self, batch_id: str) -> int:
        batch = await self._batch(batch_id)
        if batch["status"] not in ("validating", "in_progress"):
            raise RuntimeError(f"the batch is {batch['status']}: {batch['errors']}")
        num: int = batch["request_counts"]["completed"]
        return num

    async def _batch(self, batch_id: str) -> dict[str, Any]:
        return await self._ask("GET", f"batches/{batch_id}")

    async def _ask(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        async with self._session.request(method, f"/v1/{path}", **more) as response:
            response.raise_for_status()
            found: dict[str, Any] = await response.json()
            return found


async def measure(
    model: str, flags: list[str], num_rounds: int, num_requests: int
) -> dict[str, Any]:
    vocab_size = SHAPES[model]["vocab_size"]
    asked = {
        "concurrency": 1,
        "num_requests": num_requests,
        "input_len": INPUT_LEN,
        "output_len": OUTPUT_LEN,
        "vocab_size": vocab_size,
    }
    alone: list[dict[str, Any]] = []
    beside: list[dict[str, Any]] = []
    rates: list[float] = []
    alone_rates: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--no-enable-prefix-caching", "--batch-dir", folder, *flags]
        async with (
            servers.running(servers.shoal(checkpoint(model), *flags)) as url,
            aiohttp.ClientSession(url) as session,
        ):
            client = BatchClient(session)
            file_id = await client.upload(lines(vocab_size, seed=0))
            await load(url, seed=0, **asked | {"num_requests": 1})
            for seed in range(1, num_rounds + 1):
                alone.append(await load(url, seed=seed, **asked))
                async with client.running(file_id) as batch_id:
                    alone_rates.append(await client.tokens_per_s(batch_id))
                    before = await client.num_completed(batch_id)
                    beside.append(await load(url, seed=seed, **asked))
                    num_done = await client.num_completed(batch_id) - before
                rates.append(num_done * OUTPUT_LEN / beside[-1]["duration_s"])
    return {
        **{name: compared(alone, beside, name) for name in FIGURES},
        "batch beside it, tokens/s": spread(rates),
        "batch alone, tokens/s": spread(alone_rates),
    }


def compared(
    alone: list[dict[str, Any]], beside: list[dict[str, Any]], name: str
) -> dict[str, Any]:
    """Medians of each turn, and their ratios."""
    pairs = [
        (one[name]["p50"], other[name]["p50"]) for one, other in zip(alone, beside, strict=True)
    ]
    return {
        "alone": spread([one for one, _ in pairs]),
        "beside a batch": spread([other for _, other in pairs]),
        "beside / alone": spread([other / one for one, other in pairs]),
    }


async def measure_all(model: str, num_rounds: int, num_requests: int) -> dict[str, Any]:
    return {
        f"{slots}, {name}": await measure(
            model, [*flags, "--later-priority-share", str(share)], num_rounds, num_requests
        )
        for slots, flags in SLOTS.items()
        for name, share in SHARES.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="small")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=20, help="interactive ones of a turn")
    arguments = parser.parse_args()
    found = measure_all(arguments.model, arguments.rounds, arguments.requests)
    write("batches", {arguments.model: uvloop.run(found)})

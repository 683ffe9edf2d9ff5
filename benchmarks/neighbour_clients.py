"""Clients that are in the way of others, in a process of their own.

``python -m benchmarks.neighbour_clients URL KIND`` sends until its stdin ends, and then tells how
many requests were answered a second.
"""

import asyncio
import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from time import perf_counter
from typing import Any

import aiohttp
import uvloop

from cli.bench.workload import FIRST_ID, WORDS

VOCAB_SIZE = 1000
LONG_PROMPT = 2000  # tokens: what the embedded model was made for


def _wide(dice: Random) -> dict[str, Any]:
    prompt = " ".join(dice.choices(WORDS, k=8))
    body = {"prompt": prompt, "n": 32, "logprobs": 20, "max_tokens": 64, "temperature": 0.8}
    return body | {"stream": True, "ignore_eos": True}


def _text(num_bytes: int) -> Callable[[Random], dict[str, Any]]:
    """The same text each time, of words."""
    words = Random(0).choices(WORDS, k=num_bytes // 2)
    body = {"prompt": " ".join(words)[:num_bytes]}
    return lambda dice: body


def _long(dice: Random) -> dict[str, Any]:
    ids = [dice.randrange(FIRST_ID, VOCAB_SIZE) for _ in range(LONG_PROMPT)]
    return {"prompt": ids, "max_tokens": 8, "temperature": 0}


@dataclass(frozen=True)
class Kind:
    """Each client waits for its answer, and ``every_s`` from one request to the next."""

    path: str
    make: Callable[[Random], dict[str, Any]]
    num_clients: int
    every_s: float = 0.0
    status: int = 200


KINDS = {
    "n=32 with logprobs=20": Kind("/v1/completions", _wide, 2),
    # Encoded, and refused: they have more tokens than max-model-len.
    "texts of 1 MB": Kind("/v1/completions", _text(1_000_000), 2, every_s=0.5, status=400),
    "prompts of 2000 tokens": Kind("/v1/completions", _long, 1),
    "/tokenize of 500 KB": Kind("/tokenize", _text(500_000), 4),
}


async def _send_on(
    session: aiohttp.ClientSession, kind: Kind, seed: int, ends: list[float]
) -> None:
    """``ends`` gets the times at which answers ended."""
    dice = Random(seed)
    while True:
        due_s = perf_counter() + kind.every_s
        async with session.post(kind.path, json=kind.make(dice)) as response:
            async for _ in response.content.iter_any():
                pass
        if response.status != kind.status:
            raise RuntimeError(f"the answer has status {response.status}")
        ends.append(perf_counter())
        await asyncio.sleep(max(0.0, due_s - perf_counter()))


async def main(url: str, kind: Kind) -> float:
    """Answers a second."""
    ends: list[float] = []
    started_s = perf_counter()
    async with aiohttp.ClientSession(url) as session, asyncio.TaskGroup() as tasks:
        clients = [
            tasks.create_task(_send_on(session, kind, seed, ends))
            for seed in range(kind.num_clients)
        ]
        await asyncio.to_thread(sys.stdin.read)
        duration_s = perf_counter() - started_s
        for client in clients:
            client.cancel()
    return len(ends) / duration_s


if __name__ == "__main__":
    print(uvloop.run(main(sys.argv[1], KINDS[sys.argv[2]])))

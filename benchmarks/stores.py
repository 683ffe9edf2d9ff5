"""A store of KV blocks: later turns of chats whose blocks the cache has no room for, and the price
of saving.

Whole servers with and without a store are loaded in turns over HTTP. *Turns*: chats go on one after
another, so that each is evicted before its next turn. *Decode*: streams with new prompts, whose
blocks are saved and never read.
"""

import argparse
import tempfile
import time
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write

NUM_CHATS, NUM_TURNS, TURN_LEN, REPLY_LEN = 8, 4, 448, 32
BLOCKS = NUM_TURNS * (TURN_LEN + REPLY_LEN) // 16 + 16  # of one chat
SIZE = "small"
DECODE = {
    "input_len": 128,
    "output_len": 256,
    "concurrency": 8,
    "warmup": 8,
    "vocab_size": SHAPES[SIZE]["vocab_size"],
}


async def measure(num_rounds: int, num_requests: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        store = ("--kv-offloading-size", "2", "--kv-offloading-dir")
        few = ("--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "2048")
        return {
            "turns": await _in_turns(
                _first_tokens,
                few,
                (*store, f"{folder}/turns"),
                num_rounds,
                num_requests,
            ),
            "decode": await _in_turns(
                _decode, (), (*store, f"{folder}/decode"), num_rounds, num_requests
            ),
        }


async def _in_turns(
    run: Any, flags: tuple[str, ...], store: tuple[str, ...], num_rounds: int, num_requests: int
) -> dict[str, Any]:
    """``run`` gives figures by name; a ratio is that of the medians of the same round."""
    model = checkpoint(SIZE)
    async with (
        servers.running(servers.shoal(model, *flags, *store)) as saving,
        servers.running(servers.shoal(model, *flags)) as plain,
    ):
        rounds = [
            (await run(saving, seed, num_requests), await run(plain, seed, num_requests))
            for seed in range(num_rounds)
        ]
    return {
        name: {
            "with": spread([with_store[name] for with_store, _ in rounds]),
            "without": spread([without[name] for _, without in rounds]),
            "ratio": spread([with_store[name] / without[name] for with_store, without in rounds]),
        }
        for name in rounds[0][0]
    }


async def _decode(url: str, seed: int, num_requests: int) -> dict[str, float]:
    found = await load(url, seed=seed, num_requests=num_requests, **DECODE)
    return {"tokens/s": float(found["output_tokens_per_s"])}


async def _first_tokens(url: str, seed: int, num_requests: int) -> dict[str, float]:
    """The median time to the first token of each later turn, in ms."""
    rng = np.random.default_rng(seed)
    chats: list[list[int]] = [[] for _ in range(NUM_CHATS)]
    times: dict[int, list[float]] = {turn: [] for turn in range(NUM_TURNS)}
    async with aiohttp.ClientSession() as session:
        for turn in range(NUM_TURNS):
            for chat in chats:
                chat += rng.integers(10, SHAPES[SIZE]["vocab_size"], TURN_LEN).tolist()
                times[turn].append(await _turn(session, url, chat))
    return {f"turn {turn + 1}, TTFT ms": median(times[turn]) for turn in range(1, NUM_TURNS)}


async def _turn(session: aiohttp.ClientSession, url: str, chat: list[int]) -> float:
    """Adds made up ids for the reply: a prompt of ids finds blocks by ids alone."""
    body = {
        "model": checkpoint(SIZE).name,
        "prompt": chat,
        "max_tokens": REPLY_LEN,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started_s, first_s = time.perf_counter(), 0.0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if line.startswith(b"data: {") and not first_s:
                first_s = time.perf_counter() - started_s
    chat += chat[:REPLY_LEN]
    return 1e3 * first_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of few requests")
    given = parser.parse_args()
    num_rounds, num_requests = (1, 16) if given.quick else (given.rounds, 48)
    write("stores", uvloop.run(measure(num_rounds, num_requests)))


if __name__ == "__main__":
    main()

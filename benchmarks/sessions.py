"""Sessions of agents on a KV pool that is too small for them: with and without a store of KV
blocks, and with a pool without limits.

Eight sessions of 33 turns at a time, with prompts of 1,000 to 4,000 ids: the prompt of each turn
before, its reply, and new ids. Tools take the time between two turns: log-normal, with a median of
0.5 s and a 99th percentile of 8 s. The pool has room for four whole sessions. Servers are loaded in
turns with the same sessions. *Cached*: of the tokens of earlier turns in whole blocks. *Tokens/s*:
the ones of a reply, over the time from its request to its end; nine of ten turns are faster than
the lower decile.
"""

import argparse
import asyncio
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from statistics import median
from typing import Any, NamedTuple

import aiohttp
import numpy as np
import uvloop

from benchmarks import servers
from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.report import spread, write
from benchmarks.servers import Server

SIZE = "small"
NUM_SESSIONS, NUM_TURNS = 8, 33
FIRST_LEN, TURN_LEN, REPLY_LEN = 1000, 62, 32
LAST_LEN = FIRST_LEN + (NUM_TURNS - 1) * (TURN_LEN + REPLY_LEN) + REPLY_LEN
MEDIAN_PAUSE_S, P99_PAUSE_S = 0.5, 8.0
SIGMA = float(np.log(P99_PAUSE_S / MEDIAN_PAUSE_S)) / 2.3263  # 99 % of a normal distribution
BLOCK = 16
SESSION_BLOCKS = -(-LAST_LEN // BLOCK) + 1
STORE_GIB = "1"
MAX_LEN = str(SESSION_BLOCKS * BLOCK)
ROOM = "pool for all"
STORE, NO_STORE = "pool for four, store", "pool for four"


class Turn(NamedTuple):
    """Times from the request on; ``known`` ids were in earlier turns, and ``cached`` ones were not
    computed again."""

    first_s: float
    whole_s: float
    known: int
    cached: int


class Reply(NamedTuple):
    first_s: float
    whole_s: float
    ids: list[int]
    cached: int


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[list[Turn]]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        contenders = _contenders(folder)
        async with AsyncExitStack() as stack:
            urls = {
                each.name: await stack.enter_async_context(servers.running(each))
                for each in contenders
            }
            for seed in range(arguments.rounds):
                for name, url in urls.items():
                    turns = await _play(url, seed, arguments.turns)
                    runs[name].append(turns)
                    print(f"round {seed + 1}: {name}: {_figures(turns)}", flush=True)
    figures = {name: [_figures(each) for each in found] for name, found in runs.items()}
    return {
        "tokens of a session": LAST_LEN,
        "blocks of the pool for four": 4 * SESSION_BLOCKS,
        **{name: _spreads(found) for name, found in figures.items()},
        "ratios": _ratios(figures),
    }


def _contenders(folder: str) -> list[Server]:
    model = checkpoint(SIZE)
    four = ("--num-gpu-blocks-override", str(4 * SESSION_BLOCKS), "--max-model-len", MAX_LEN)
    room = ("--num-gpu-blocks-override", str(40 * SESSION_BLOCKS), "--max-model-len", MAX_LEN)
    store = ("--kv-offloading-size", STORE_GIB, "--kv-offloading-dir", f"{folder}/store")
    return [
        servers.shoal(model, *room, name=ROOM),
        servers.shoal(model, *four, *store, name=STORE),
        servers.shoal(model, *four, name=NO_STORE),
    ]


async def _play(url: str, seed: int, num_turns: int) -> list[Turn]:
    """Returns the turns of all sessions; the same prompts and pauses for each server."""
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        found = await asyncio.gather(
            *(
                _session(session, url, np.random.default_rng((seed, number)), num_turns)
                for number in range(NUM_SESSIONS)
            )
        )
    return [turn for turns in found for turn in turns]


async def _session(
    session: aiohttp.ClientSession, url: str, rng: np.random.Generator, num_turns: int
) -> list[Turn]:
    ids: list[int] = []
    turns: list[Turn] = []
    for number in range(num_turns):
        pause_s = MEDIAN_PAUSE_S * float(np.exp(SIGMA * rng.standard_normal()))
        new = rng.integers(10, SHAPES[SIZE]["vocab_size"], TURN_LEN if number else FIRST_LEN)
        await asyncio.sleep(pause_s)
        known = max(0, len(ids) - 1)  # the last id of a reply is not computed
        ids += new.tolist()
        reply = await _ask(session, url, ids)
        turns.append(Turn(reply.first_s, reply.whole_s, known // BLOCK * BLOCK, reply.cached))
        if len(reply.ids) != REPLY_LEN:
            raise RuntimeError(f"a reply of {len(reply.ids)} ids instead of {REPLY_LEN}")
        ids += reply.ids
    return turns


async def _ask(session: aiohttp.ClientSession, url: str, ids: Sequence[int]) -> Reply:
    body = {
        "model": checkpoint(SIZE).name,
        "prompt": ids,
        "max_tokens": REPLY_LEN,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    started_s, first_s, cached = time.perf_counter(), 0.0, 0
    found: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for event in _events(response):
            first_s = first_s or time.perf_counter() - started_s
            for choice in event["choices"]:
                found += choice.get("token_ids") or []
            if usage := event.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Reply(first_s, time.perf_counter() - started_s, found, cached)


async def _events(response: aiohttp.ClientResponse) -> Any:
    async for line in response.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _figures(turns: list[Turn]) -> dict[str, float]:
    later = [each for each in turns if each.known]
    firsts = [1e3 * each.first_s for each in later]
    rates = [REPLY_LEN / each.whole_s for each in later]
    return {
        "cached": round(sum(e.cached for e in later) / sum(e.known for e in later), 3),
        "TTFT ms, median": round(median(firsts), 1),
        "TTFT ms, P90": round(float(np.percentile(firsts, 90)), 1),
        "tokens/s, median": round(median(rates), 1),
        "tokens/s, lower decile": round(float(np.percentile(rates, 10)), 1),
    }


def _spreads(found: list[dict[str, float]]) -> dict[str, Any]:
    return {name: spread([each[name] for each in found]) for name in found[0]}


def _ratios(figures: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Of the same round."""

    def ratio(figure: str, one: str, other: str) -> dict[str, float]:
        pairs = zip(figures[one], figures[other], strict=True)
        return spread([mine[figure] / its[figure] for mine, its in pairs])

    return {
        f"TTFT P90, {name} to {ROOM}": ratio("TTFT ms, P90", name, ROOM)
        for name in (STORE, NO_STORE)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--rounds", type=int, default=3)
    add("--turns", type=int, default=NUM_TURNS, help="of a session (default: %(default)s)")
    arguments = parser.parse_args()
    write("sessions", uvloop.run(measure(arguments)))


if __name__ == "__main__":
    main()

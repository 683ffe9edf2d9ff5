"""What does a schema cost: the same number of tokens, free or held to a JSON schema.

One whole server with the embedded model, loaded over HTTP by so many streams, in turns; then the
time to the first token of single requests whose schema nobody has sent before.
"""

import argparse
import asyncio
import itertools
import json
import time
from statistics import median
from typing import Any

import aiohttp
import uvloop

from benchmarks import servers
from benchmarks.report import spread, write
from shared.model_folder import EMBEDDED_MODEL

NUM_STREAMS = (1, 8, 32)
NUM_TOKENS = 128  # the schema's text is longer: nobody ends before
NUM_FRESH = 40
KINDS = ("free", "schema")

_numbers = itertools.count()


def schema() -> dict[str, Any]:
    """A small schema that no request before had."""
    person: dict[str, Any] = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            f"key_{next(_numbers)}": {"enum": ["red", "green", "blue"]},
        },
        "additionalProperties": False,
    }
    person["required"] = list(person["properties"])
    return {"type": "array", "items": person, "minItems": 100}


def body_of(kind: str, value: dict[str, Any], seed: int, num_tokens: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "prompt": f"Some people, number {seed}:",
        "max_tokens": num_tokens,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if kind == "schema":
        return body | {"structured_outputs": {"json": value}}
    return body | {"ignore_eos": True}


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> tuple[int, float]:
    """How many tokens came, and after how many seconds the first one."""
    started_s, first_s, num_tokens = time.perf_counter(), 0.0, 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            first_s = first_s or time.perf_counter() - started_s
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(str(event["error"]))
            if usage := event.get("usage"):
                num_tokens = usage["completion_tokens"]
    return num_tokens, first_s


async def rate(session: aiohttp.ClientSession, url: str, kind: str, num_streams: int) -> float:
    """Tokens a second of ``num_streams`` requests at once that share a schema."""
    value = schema()
    bodies = [body_of(kind, value, seed, NUM_TOKENS) for seed in range(num_streams)]
    started_s = time.perf_counter()
    answers = await asyncio.gather(*(ask(session, url, body) for body in bodies))
    seconds = time.perf_counter() - started_s
    if short := [num for num, _ in answers if num != NUM_TOKENS]:
        raise RuntimeError(f"answers of {short} tokens instead of {NUM_TOKENS}")
    return num_streams * NUM_TOKENS / seconds


async def first_token_ms(session: aiohttp.ClientSession, url: str, kind: str) -> float:
    return 1e3 * (await ask(session, url, body_of(kind, schema(), 0, 1)))[1]


async def measure(num_rounds: int, num_fresh: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    server = servers.checkout("--model", str(EMBEDDED_MODEL))
    async with servers.running(server) as url, aiohttp.ClientSession() as session:
        for num_streams in NUM_STREAMS:
            await rate(session, url, "schema", num_streams)
            rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for number in range(num_rounds):
                for kind in KINDS if number % 2 else reversed(KINDS):
                    rates[kind].append(await rate(session, url, kind, num_streams))
            ratios = [held / free for free, held in zip(*rates.values(), strict=True)]
            results[f"{num_streams} streams"] = {
                **{f"{kind}, tokens/s": spread(each) for kind, each in rates.items()},
                "tokens/s, ratio of schema to free": spread(ratios),
            }
        firsts: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for _ in range(num_fresh):
            for kind in KINDS:
                firsts[kind].append(await first_token_ms(session, url, kind))
        results["first token"] = {
            **{f"{kind}, ms": spread(each) for kind, each in firsts.items()},
            "a fresh schema adds, ms": round(median(firsts["schema"]) - median(firsts["free"]), 3),
        }
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round, few first tokens")
    arguments = parser.parse_args()
    rounds, fresh = (1, 5) if arguments.quick else (arguments.rounds, NUM_FRESH)
    write("structured", uvloop.run(measure(rounds, fresh)))

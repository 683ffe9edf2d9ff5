"""What does a stream feel of hostile grammars, and how soon is each of them answered?

One whole server with the embedded model: streams one behind the other, first alone, then while
somebody sends one grammar after another that is large, deep or ambiguous. Most are refused, those
that turn out to be cheap are held. A gap is the time between two chunks of a stream.
"""

import argparse
import asyncio
import json
import time
from collections import defaultdict
from statistics import median
from typing import Any

import aiohttp
import uvloop

from benchmarks import servers
from benchmarks.report import spread, write
from shared.model_folder import EMBEDDED_MODEL

PATH = "/v1/completions"
STREAM = {"prompt": "import asyncio", "max_tokens": 1500, "ignore_eos": True, "stream": True}
MAX_ANSWER_S = 30.0
OUTCOMES = {200: "held", 400: "refused"}


def optional(num: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(num)}}


def nested(num: int) -> dict[str, Any]:
    """Objects that nest by references."""
    steps: dict[str, Any] = {
        f"d{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(num)
    }
    return {"$ref": "#/$defs/d0", "$defs": steps | {f"d{num}": {"type": "string"}}}


def chained(num: int) -> str:
    rules = "".join(f"r{i}: r{i + 1}\n" for i in range(num))
    return f'start: r0\n{rules}r{num}: "a"\n'


GRAMMARS: dict[str, dict[str, Any]] = {
    "400 optional properties": {"json": optional(400)},
    "5,000 optional properties": {"json": optional(5000)},
    "1,000 objects nested by references": {"json": nested(1000)},
    "an enumeration of 50,000": {"json": {"enum": list(range(50_000))}},
    "a reference to itself": {"json": {"$ref": "#"}},
    "5,000 rules in a chain": {"grammar": chained(5000)},
    "3,000 alternatives": {"grammar": "start: " + " | ".join(f'"{i}"' for i in range(3000)) + "\n"},
    "an ambiguous grammar": {"grammar": 'start: s\ns: s s | "a" s | "a" | "ab" s | "b"\n'},
    "brackets 20,000 deep": {"grammar": "start: " + "(" * 20_000 + '"a"' + ")" * 20_000 + "\n"},
    "a pattern with huge counts": {"regex": "((a{1,1000}){1,1000}){1,1000}b"},
}


async def gaps_ms(session: aiohttp.ClientSession, stop: asyncio.Event) -> list[float]:
    """Of streams one behind the other, at least one, until ``stop``."""
    gaps: list[float] = []
    while not gaps or not stop.is_set():
        async with session.post(PATH, json=STREAM) as response:
            response.raise_for_status()
            last_s = 0.0
            async for line in response.content:
                if line.startswith(b"data: {"):
                    now_s = time.perf_counter()
                    if last_s:
                        gaps.append(1e3 * (now_s - last_s))
                    last_s = now_s
    return gaps


async def answer(session: aiohttp.ClientSession, grammar: dict[str, Any]) -> tuple[str, float]:
    """The outcome, and after how many ms."""
    body = {"prompt": "x", "max_tokens": 16, "structured_outputs": grammar}
    started_s = time.perf_counter()
    async with asyncio.timeout(MAX_ANSWER_S), session.post(PATH, json=body) as response:
        text = await response.text()
        if response.status not in OUTCOMES:
            raise RuntimeError(f"status {response.status}: {text[:300]}")
    return OUTCOMES[response.status], 1e3 * (time.perf_counter() - started_s)


async def answers(session: aiohttp.ClientSession, number: int) -> dict[str, tuple[str, float]]:
    """``number`` makes grammars new, for verdicts are remembered."""
    found = {}
    for name, grammar in GRAMMARS.items():
        fresh = json.loads(json.dumps(grammar))
        if "json" in fresh:
            fresh["json"]["$defs"] = fresh["json"].get("$defs", {}) | {f"n{number}": {}}
        elif "grammar" in fresh:
            fresh["grammar"] += f"// {number}\n"
        else:
            fresh["regex"] += "c" * number
        found[name] = await answer(session, fresh)
    return found


async def measure(num_rounds: int) -> dict[str, Any]:
    times_ms: dict[tuple[str, str], list[float]] = defaultdict(list)
    gaps: dict[str, list[list[float]]] = {"alone": [], "beside them": []}
    server = servers.checkout("--model", str(EMBEDDED_MODEL))
    async with servers.running(server) as url, aiohttp.ClientSession(url) as session:
        await answers(session, 0)  # the process that tries grammars starts with the first
        for number in range(1, num_rounds + 1):
            stop = asyncio.Event()
            stop.set()
            gaps["alone"].append(await gaps_ms(session, stop))
            stop.clear()
            beside = asyncio.create_task(gaps_ms(session, stop))
            for name, (outcome, time_ms) in (await answers(session, number)).items():
                times_ms[name, outcome].append(time_ms)
            stop.set()
            gaps["beside them"].append(await beside)
    return {
        "ms to the answer": {
            f"{name}: {outcome}": spread(each) for (name, outcome), each in times_ms.items()
        },
        **{f"gap {name}, ms": _gaps(rounds) for name, rounds in gaps.items()},
    }


def _gaps(rounds: list[list[float]]) -> dict[str, Any]:
    return {
        "median": spread([median(each) for each in rounds]),
        "longest": spread([max(each) for each in rounds]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    write("hostile_grammars", uvloop.run(measure(parser.parse_args().rounds)))

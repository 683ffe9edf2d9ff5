"""Speed of speculation, and of the automatic draft depth compared with the best fixed depth.

Whole servers of the embedded model, without drafts, with one to three drafts of its MTP head, and
with an automatic number, are loaded in turns over HTTP with prompts held out of training. All of
them generate the same outputs.
"""

import argparse
import json
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import servers
from benchmarks.load import load
from benchmarks.prompts import write_trace
from benchmarks.report import spread, write
from shared.model_folder import EMBEDDED_MODEL

MAX_DEPTH = 3
PINNED = [str(depth) for depth in range(MAX_DEPTH + 1)]
KINDS = [*PINNED, "auto"]
NUM_REQUESTS = {1: 6, 8: 32, 32: 96}
SAMPLING = {"greedy": 0.0, "temperature 1": 1.0}


def server(kind: str) -> servers.Server:
    speculation: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": MAX_DEPTH}
    if kind == "0":
        speculation = {"method": "none"}
    elif kind != "auto":
        speculation |= {"num_speculative_tokens": int(kind), "adaptive": False}
    flags = ("--no-enable-prefix-caching", "--speculative-config", json.dumps(speculation))
    return servers.shoal(EMBEDDED_MODEL, *flags, name=kind)


async def measure(streams: list[int], num_rounds: int, max_tokens: int) -> dict[str, Any]:
    found = {}
    async with AsyncExitStack() as stack:
        urls = {
            kind: await stack.enter_async_context(servers.running(server(kind))) for kind in KINDS
        }
        for num_streams in streams:
            for name, temperature in SAMPLING.items():
                flags = {"concurrency": num_streams, "temperature": temperature}
                point = await _point(urls, flags, num_rounds, max_tokens)
                found[f"{name} × {num_streams}"] = point
    return found


async def _point(
    urls: dict[str, str], flags: dict[str, Any], num_rounds: int, max_tokens: int
) -> dict[str, Any]:
    """A warm-up round lets the automatic depth settle."""
    runs: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.jsonl"
        write_trace(trace, NUM_REQUESTS[flags["concurrency"]], max_tokens)
        for number in range(num_rounds + 1):
            for kind in KINDS[number % len(KINDS) :] + KINDS[: number % len(KINDS)]:
                extra = json.dumps({"seed": number})
                run = await load(urls[kind], trace=trace, extra_body=extra, **flags)
                runs[kind].append(run["output_tokens_per_s"])
    counted = {kind: rates[1:] for kind, rates in runs.items()}
    point: dict[str, Any] = {f"depth {kind}, tokens/s": spread(counted[kind]) for kind in KINDS}
    best = max(PINNED, key=lambda kind: point[f"depth {kind}, tokens/s"]["median"])
    pairs = zip(counted["auto"], counted[best], strict=True)
    return point | {"best pinned": best, "ratio of auto to it": spread([a / b for a, b in pairs])}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", nargs="+", type=int, choices=NUM_REQUESTS, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    figures = measure(arguments.streams, arguments.rounds, arguments.max_tokens)
    write("speculation", uvloop.run(figures))

"""Whole servers of two checkouts of Shoal, run side by side and loaded in turns.

python -m benchmarks.served_checkouts FOLDER

FOLDER holds the other checkout, native code included. Prompts of 128 ids in bfloat16, no prefix
cache; the client shares the cores with both servers, one of them idle. A ratio above 1 means that
ours has more tokens per second, or takes longer per token.
"""

import argparse
import subprocess
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.checkpoints import SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.report import spread, write
from benchmarks.servers import ROOT, Server, checkout, running

PROMPT_LEN = 128
OUTPUT_LENS = {"small": 256, "medium": 64}

Figures = dict[str, float]


def server(folder: Path, model: Path) -> Server:
    flags = ["--model", str(model), "--dtype", "bfloat16", "--no-enable-prefix-caching"]
    return checkout(*flags, name=folder.name, folder=folder)


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in arguments.models:
        model = checkpoint(name)
        async with AsyncExitStack() as stack:
            urls = [
                await stack.enter_async_context(running(server(folder, model)))
                for folder in (ROOT, arguments.folder)
            ]
            for num_streams in arguments.streams:
                pairs = [
                    await _round(urls, number, name, num_streams, arguments.waves)
                    for number in range(arguments.rounds + 1)
                ]
                found[f"{name} × {num_streams}"] = _figures(pairs[1:])  # the first round is warm-up
                print(name, num_streams, found[f"{name} × {num_streams}"], flush=True)
    return found


async def _round(
    urls: list[str], number: int, name: str, num_streams: int, waves: int
) -> list[Figures]:
    """Figures of ours and of the other; the order alternates between rounds."""
    runs: dict[str, Figures] = {}
    for url in urls if number % 2 else urls[::-1]:
        figures = await load(
            url,
            concurrency=num_streams,
            num_requests=num_streams * waves,
            input_len=PROMPT_LEN,
            output_len=OUTPUT_LENS[name],
            vocab_size=SHAPES[name]["vocab_size"],
            seed=1000 * number + num_streams,
        )
        runs[url] = {
            "tokens/s": figures["output_tokens_per_s"],
            "TTFT ms, p50": figures["ttft_ms"]["p50"],
            "TTFT ms, p99": figures["ttft_ms"]["p99"],
            "ITL ms, p99": figures["itl_ms"]["p99"],
        }
    return [runs[url] for url in urls]


def _figures(pairs: list[list[Figures]]) -> dict[str, Any]:
    return {
        name: {
            "ours": spread([ours[name] for ours, _ in pairs]),
            "theirs": spread([theirs[name] for _, theirs in pairs]),
            "ratio": spread([ours[name] / theirs[name] for ours, theirs in pairs]),
        }
        for name in pairs[0][0]
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=["small"], choices=OUTPUT_LENS)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--waves", type=int, default=4)
    arguments = parser.parse_args()
    arguments.folder = arguments.folder.resolve()
    git = ["git", "-C", str(arguments.folder), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()
    found = uvloop.run(measure(arguments))
    write("served_checkouts", {"compared with": head, "ratios": found})

"""Steps of the engine and its start in two checkouts of Shoal, whose processes take turns.

    python -m benchmarks.checkouts FOLDER

FOLDER holds the checkout that ours is compared with, native code included. Prompts of 128 ids in
bfloat16; a ratio above 1 says that ours is faster, or takes longer to start.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import checkpoint
from benchmarks.report import spread, write
from benchmarks.servers import ROOT, SHOAL

FIGURES = ("prefill_tokens_per_s", "decode_tokens_per_s")
NUM_DECODED = {"small": 256, "medium": 32}  # of each stream


def run(folder: Path, model: Path, num_streams: int, num_decoded: int) -> dict[str, float]:
    """Figures of one process, ``total_s`` among them."""
    with tempfile.TemporaryDirectory() as results:
        file = Path(results) / "found.json"
        flags = ["--model", str(model), "--dtype", "bfloat16", "--concurrency", str(num_streams)]
        flags += ["--output-len", str(num_decoded), "--json", str(file)]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        began_s = time.perf_counter()
        subprocess.run(
            [*SHOAL, "bench", "engine", *flags],
            check=True,
            capture_output=True,
            cwd=folder,
            env=environment,
        )
        total_s = time.perf_counter() - began_s
        figures: dict[str, float] = json.loads(file.read_text())["figures"]
    return figures | {"total_s": total_s}


def compare(
    other: Path, model: Path, num_streams: int, num_rounds: int, num_decoded: int
) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Ours and the other's of each round; who begins changes from round to round."""
    pairs = []
    for turn in range(num_rounds):
        folders = [ROOT, other] if turn % 2 else [other, ROOT]
        found = {each: run(each, model, num_streams, num_decoded) for each in folders}
        pairs.append((found[ROOT], found[other]))
    return pairs


def ratios(pairs: list[tuple[dict[str, float], dict[str, float]]], name: str) -> dict[str, float]:
    return spread([ours[name] / theirs[name] for ours, theirs in pairs])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", default=list(NUM_DECODED), choices=NUM_DECODED)
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    other = args.folder.resolve()
    found: dict[str, Any] = {}
    for name in args.models:
        model = checkpoint(name)
        for num_streams in args.streams:
            pairs = compare(other, model, num_streams, args.rounds, NUM_DECODED[name])
            found[f"{name} × {num_streams}"] = {each: ratios(pairs, each) for each in FIGURES}
        start = compare(other, model, num_streams=1, num_rounds=args.rounds, num_decoded=1)
        found[f"{name}: start, prefill and one token"] = ratios(start, "total_s")
    head = subprocess.run(
        ["git", "-C", str(other), "rev-parse", "--short", "HEAD"],
        check=True,
        capture_output=True,
        text=True,
    )
    write("checkouts", {"compared with": head.stdout.strip(), "ratios": found})

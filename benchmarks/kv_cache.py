"""What codes of eight bits in the KV cache bring on a CPU: the engine's steps after long prompts.

Models of ``benchmarks.checkpoints`` in bfloat16, with random weights and room for longer texts;
``shoal bench engine`` as a process each time, rounds of all alternate. Beside it the memory's read
bandwidth.
"""

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.bandwidth import METHOD, read_bytes_per_s
from benchmarks.checkpoints import checkpoint
from benchmarks.engine import FIGURES, compared, figures
from benchmarks.report import write

CODES = ("int8", "fp8")
NUM_DECODED = 64
MAX_POSITIONS = 16384


class Shape(NamedTuple):
    """So many sequences at once, with prompts of so many tokens; written as small:4:8000."""

    model: str
    num_streams: int
    input_len: int

    @classmethod
    def parse(cls, text: str) -> "Shape":
        model, num_streams, input_len = text.split(":")
        return cls(model, int(num_streams), int(input_len))

    def __str__(self) -> str:
        return f"{self.model} × {self.num_streams}, {self.input_len} tokens"


SHAPES = [Shape("small", 1, 8000), Shape("small", 4, 8000), Shape("medium", 1, 4096)]


def save_model(name: str, folder: Path) -> None:
    """Without its weights."""
    source = checkpoint(name)
    for file in source.glob("*.json"):
        shutil.copyfile(file, folder / file.name)
    config = json.loads((source / "config.json").read_text())
    config["max_position_embeddings"] = MAX_POSITIONS
    (folder / "config.json").write_text(json.dumps(config))


def run(shape: Shape, kind: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        save_model(shape.model, Path(folder))
        flags = ["--model", folder, "--load-format", "dummy", "--dtype", "bfloat16"]
        flags += ["--kv-cache-dtype", kind, "--concurrency", str(shape.num_streams)]
        flags += ["--input-len", str(shape.input_len), "--output-len", str(NUM_DECODED)]
        return figures(flags)


def measure(shapes: list[Shape], num_rounds: int) -> dict[str, Any]:
    found = {}
    for shape in shapes:
        runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in ("auto", *CODES)}
        for _ in range(num_rounds):
            for kind, each in runs.items():
                each.append(run(shape, kind))
        ratios = [(codes, "auto") for codes in CODES]
        found[str(shape)] = {name: compared(runs, name, ratios) for name in FIGURES}
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, default=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    bandwidth = {"GB/s": round(read_bytes_per_s() / 1e9, 1), "how": METHOD}
    write("kv_cache", {"read bandwidth": bandwidth, "tokens/s": measure(args.shapes, args.rounds)})

"""Native code and quantized weights on a CPU: engine steps with torch's operators, with native
code, and with ``quantization: wint8`` and ``wint4``, also with quantized activations
(``activation-dtype: int8``; of ``wint8`` on CPUs with AVX512-VNNI alone) or a quantized head
(``lm-head-quantization``).

Two models of ``benchmarks.checkpoints`` in bfloat16, prompts of 128 ids, 32 decoded tokens. Each
run is a process of ``shoal bench engine``; rounds of all configurations alternate. The memory's
read bandwidth is measured too.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.bandwidth import METHOD, read_bytes_per_s
from benchmarks.checkpoints import checkpoint
from benchmarks.report import spread, write
from benchmarks.servers import SHOAL

KINDS = {
    "native": ["--native-kernels"],
    "torch": ["--no-native-kernels"],
    "wint8": ["--quantization", "wint8"],
    "wint4": ["--quantization", "wint4"],
    "wint8, head": ["--quantization", "wint8", "--lm-head-quantization", "wint8"],
    "wint4, head": ["--quantization", "wint4", "--lm-head-quantization", "wint8"],
    "wint8, rounded": ["--quantization", "wint8", "--activation-dtype", "int8"],
    "wint4, rounded": ["--quantization", "wint4", "--activation-dtype", "int8"],
}
RATIOS = (
    *((kind, "native") for kind in ("wint8", "wint4", "wint8, rounded", "wint4, rounded")),
    *((f"{form}, head", form) for form in ("wint8", "wint4")),
    ("native", "torch"),
)
FIGURES = ("prefill_tokens_per_s", "decode_tokens_per_s")
NUM_DECODED = 32


def run(model: str, num_streams: int, num_threads: int, kind: str) -> dict[str, float]:
    flags = ["--model", str(checkpoint(model)), "--dtype", "bfloat16", *KINDS[kind]]
    flags += ["--num-threads", str(num_threads), "--concurrency", str(num_streams)]
    return figures([*flags, "--output-len", str(NUM_DECODED)])


def figures(flags: list[str]) -> dict[str, float]:
    """The figures of one process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        command = [*SHOAL, "bench", "engine", *flags, "--json", str(file)]
        subprocess.run(command, check=True, capture_output=True)
        found: dict[str, float] = json.loads(file.read_text())["figures"]
        return found


def measure(args: argparse.Namespace) -> Any:
    found = {}
    ratios = [pair for pair in RATIOS if {*pair} <= {*args.kinds}]
    for model in args.models:
        for num_streams in args.streams:
            for num_threads in args.threads:
                runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in args.kinds}
                for _ in range(args.rounds):
                    for kind, each in runs.items():
                        each.append(run(model, num_streams, num_threads, kind))
                found[f"{model} × {num_streams}, {num_threads} threads"] = {
                    name: compared(runs, name, ratios) for name in FIGURES
                }
    return found


def compared(
    runs: dict[str, list[dict[str, float]]], name: str, wanted: Iterable[tuple[str, str]]
) -> dict[str, Any]:
    """One figure for each configuration, and ratios round by round."""
    values = {kind: [each[name] for each in found] for kind, found in runs.items()}
    ratios = {
        f"{one} / {other}": spread(
            [one / other for one, other in zip(values[one], values[other], strict=True)]
        )
        for one, other in wanted
    }
    return {kind: spread(each) for kind, each in values.items()} | ratios


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    args = parser.parse_args()
    bandwidth = {"GB/s": round(read_bytes_per_s() / 1e9, 1), "how": METHOD}
    write("engine", {"read bandwidth": bandwidth, "tokens/s": measure(args)})

"""GEMMs of activations with a layer's weights, by native code and by torch (oneDNN).

``num-matrices`` matrices of one shape are multiplied in sequence, so that they are read from memory
like a model's. Compares every native variant this CPU can run, dense and in every form (integer
forms also with rounded activations), and torch's bfloat16 linear. Rounds of all alternate; GFLOP/s
and ratios are those of each one's best round.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.report import spread, write
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import Form, Kind, Operator
from kernels.cpu.packing import NativeLibrary, can_round
from kernels.cpu.program import Buffer, NativeProgram
from services.worker.weights.online import ONLINE, Quantization

DTYPE = torch.bfloat16
PAUSE_S = 0.3  # torch's threads spin while they wait for work
FORMS: tuple[Quantization, ...] = ("none", *ONLINE)
ROUNDED: dict[Quantization, Form] = {"wint8": Form.INT8, "wint4": Form.GROUPED_INT4}
Run = Callable[[torch.Tensor], Any]


def native(
    variant: str,
    weights: list[torch.Tensor],
    num_threads: int,
    form: Quantization,
    *,
    rounds: bool = False,
) -> Run:
    library = NativeLibrary(load_library(variant), DTYPE, num_threads, rounds=rounds)
    n, k = weights[0].shape
    operators = [Operator(kind=Kind.NARROW, source=0, out=1, size=k)]
    for weight in weights:
        if form == "none":
            packed = library.pack(weight)
        else:
            packed = library.pack_codes(ONLINE[form](weight).as_codes)
        operators.append(Operator(kind=Kind.LINEAR, source=1, out=2, size=k, weight=packed))
    sizes = [(k, torch.float32), (k, DTYPE), (n, torch.float32)]
    buffers = [Buffer(size, dtype) for size, dtype in sizes]
    program = NativeProgram(library, operators, buffers, 1, 2)
    return lambda x: program.run([x])


def by_torch(weights: list[torch.Tensor]) -> Run:
    def run(x: torch.Tensor) -> None:
        narrow = x.to(DTYPE)
        for weight in weights:
            torch.nn.functional.linear(narrow, weight)

    return run


def measure(args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(args.threads)
    shape = (args.outputs, args.inputs)
    weights = [torch.randn(shape).to(DTYPE) for _ in range(args.num_matrices)]
    runs: dict[str, Run] = {"torch": by_torch(weights)}
    for variant in args.builds:
        for form in FORMS:
            name = variant if form == "none" else f"{variant}, {form}"
            runs[name] = native(variant, weights, args.threads, form)
        for form in ROUNDED:
            if can_round(load_library(variant), ROUNDED[form]):
                runs[f"{variant}, {form}, rounded"] = native(
                    variant, weights, args.threads, form, rounds=True
                )
    num_operations = 2 * args.num_matrices * args.outputs * args.inputs
    found = {}
    for num_rows in args.rows:
        x = torch.randn(num_rows, args.inputs)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(args.rounds):
            for name, run in runs.items():
                time.sleep(PAUSE_S)
                start = time.perf_counter()
                run(x)
                seconds[name].append(time.perf_counter() - start)
        best = {name: min(each) for name, each in seconds.items()}
        found[f"{num_rows} rows"] = {
            name: {
                "ms": spread([1e3 * each for each in values]),
                "GFLOP/s": round(num_rows * num_operations / best[name] / 1e9, 1),
                "times torch": round(best["torch"] / best[name], 2),
            }
            for name, values in seconds.items()
        }
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--num-matrices", type=int, default=24)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--builds", nargs="+", choices=variants(), default=variants())
    args = parser.parse_args()
    write("products", {"of": vars(args), "by number of rows": measure(args)})

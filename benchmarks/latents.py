"""Attention to latents by native code, in a layer of DeepSeek-V3's sizes, beside the product of a
dense matrix, which says what the cores can compute.

What is timed is a layer's ``LATENT`` operator: its cache, its queries as latents see them,
attention and its values. Rounds of all steps alternate; GFLOP/s are those of each one's best round.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.products import native
from benchmarks.report import spread, write
from kernels.cpu.library import find_variant, load_library, variants
from kernels.cpu.operators import LANES, Kind, Operator, PackedLatents
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from kernels.paged_attention import prepare_attention

CPU, DTYPE = torch.device("cpu"), torch.bfloat16
RANK, NOPE_DIM, ROPE_DIM, VALUE_DIM = 512, 128, 64, 128
ENTRY_DIM, QUERY_DIM = RANK + ROPE_DIM, NOPE_DIM + ROPE_DIM
BLOCK_SIZE = 16
DENSE_ROWS, DENSE_SHAPE = 512, (3072, 1024)


class Step(NamedTuple):
    """``rows`` of as many ``tokens`` each, the last of which see ``keys``."""

    rows: int
    tokens: int
    keys: int

    def num_operations(self, num_heads: int) -> int:
        seen = sum(range(self.keys - self.tokens + 1, self.keys + 1))
        attended = seen * (ENTRY_DIM + RANK) + self.tokens * (NOPE_DIM + VALUE_DIM) * RANK
        return 2 * self.rows * num_heads * attended


STEPS = {
    "1 token after 2,047": Step(1, 1, 2048),
    "8 rows of 1 token after 2,047": Step(8, 1, 2048),
    "4 tokens after 2,044": Step(1, 4, 2048),
    "512 tokens after 0": Step(1, 512, 512),
    "512 tokens after 1,536": Step(1, 512, 2048),
}


def make_layer(library: NativeLibrary, num_heads: int) -> NativeProgram:
    """Buffers are queries and latents as they are made, what comes out, two that the operator needs
    and the few numbers that a program gives back as float32."""
    table = torch.randn(max(step.keys for step in STEPS.values()), ROPE_DIM)
    latents = PackedLatents(
        latent=1,
        queries=3,
        attended=4,
        num_heads=num_heads,
        rank=RANK,
        nope_dim=NOPE_DIM,
        rope_dim=ROPE_DIM,
        value_dim=VALUE_DIM,
        is_interleaved=True,
        eps=1e-6,
        scale=QUERY_DIM**-0.5,
        norm=torch.ones(RANK),
        cos=table.cos(),
        sin=table.sin(),
        keys=library.pack(torch.randn(num_heads * RANK, NOPE_DIM).mul_(NOPE_DIM**-0.5)),
        values=library.pack(torch.randn(num_heads * VALUE_DIM, RANK).mul_(RANK**-0.5)),
    )
    width, given = num_heads * VALUE_DIM, num_heads * QUERY_DIM
    few = library.pack(torch.randn(LANES, width))
    operators = [
        Operator(kind=Kind.LATENT, source=0, out=2, size=given, latents=latents),
        Operator(kind=Kind.LINEAR, source=2, out=5, size=width, weight=few),
    ]
    sizes = [
        *((given, torch.float32), (ENTRY_DIM, torch.float32), (width, DTYPE)),
        *((num_heads * ENTRY_DIM, DTYPE), (num_heads * RANK, DTYPE), (LANES, torch.float32)),
    ]
    return NativeProgram(library, operators, [Buffer(*each) for each in sizes], 2, 5)


def make_run(layer: NativeProgram, step: Step, num_heads: int) -> Callable[[], Any]:
    num_tokens, per_row = step.rows * step.tokens, -(-step.keys // BLOCK_SIZE)
    tables = np.random.default_rng(0).permutation(step.rows * per_row).reshape(step.rows, -1)
    positions = np.tile(np.arange(step.keys - step.tokens, step.keys), (step.rows, 1))
    slots = np.take_along_axis(tables, positions // BLOCK_SIZE, 1) * BLOCK_SIZE
    attention = prepare_attention(
        np.full(step.rows, step.tokens),
        np.full(step.rows, step.keys),
        tables,
        BLOCK_SIZE,
        DTYPE,
        CPU,
    )
    inputs = torch.randn(num_tokens, num_heads * QUERY_DIM), torch.randn(num_tokens, ENTRY_DIM)
    cache = torch.randn(step.rows * per_row, BLOCK_SIZE, 1, 1, ENTRY_DIM).to(DTYPE)
    return partial(
        layer.run,
        inputs,
        torch.from_numpy(positions.ravel()),
        torch.from_numpy((slots + positions % BLOCK_SIZE).ravel()),
        attention,
        [(cache, None)],
    )


def measure(args: argparse.Namespace) -> dict[str, Any]:
    library = NativeLibrary(load_library(args.build), DTYPE, args.threads)
    layer = make_layer(library, args.heads)
    dense = native(args.build, [torch.randn(DENSE_SHAPE).to(DTYPE)], args.threads, "none")
    runs = {name: make_run(layer, step, args.heads) for name, step in STEPS.items()}
    operations = {name: step.num_operations(args.heads) for name, step in STEPS.items()}
    product = f"{DENSE_ROWS} rows times a dense matrix"
    runs[product] = partial(dense, torch.randn(DENSE_ROWS, DENSE_SHAPE[1]))
    operations[product] = 2 * DENSE_ROWS * DENSE_SHAPE[0] * DENSE_SHAPE[1]
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: {
            "ms": spread([1e3 * each for each in values]),
            "GFLOP/s": round(operations[name] / min(values) / 1e9, 1),
        }
        for name, values in seconds.items()
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--build", choices=variants(), default=find_variant())
    args = parser.parse_args()
    write("latents", {"of": vars(args), "steps": measure(args)})

"""A layer's experts by native code, beside a dense layer of the size that is active for a token.

Tokens are drawn anew for each round, so that they choose other experts, and there are as many dense
layers, which take turns, as have the experts' size together: both come from the memory. Rounds of
all alternate; ratios and GB/s, of the experts that are hit on average, are those of each one's best
round.
"""

import argparse
import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import spread, write
from kernels.cpu.library import find_variant, load_library, variants
from kernels.cpu.operators import Kind, Operator, PackedExperts, PackedMatrix
from kernels.cpu.packing import NativeLibrary, gate_up_order
from kernels.cpu.program import Buffer, NativeProgram
from kernels.route import Routing
from services.worker.weights.online import ONLINE, Quantization

DTYPE = torch.bfloat16
FORMS: tuple[Quantization, ...] = ("none", *ONLINE)


class Packer:
    """Packs random weights in one form."""

    def __init__(self, library: NativeLibrary, form: Quantization) -> None:
        self.library = library
        self._form = form
        self.num_bytes = 0

    def pack(self, outputs: int, inputs: int, *, is_gated: bool = False) -> PackedMatrix:
        order = gate_up_order(outputs // 2) if is_gated else None
        weight = torch.randn(outputs, inputs).mul_(inputs**-0.5).to(DTYPE)
        if self._form == "none":
            packed = self.library.pack(weight, order=order)
        else:
            packed = self.library.pack_codes(ONLINE[self._form](weight).as_codes, order=order)
        self.num_bytes += sum(each.nbytes for each in packed.tensors)
        return packed


def program(library: NativeLibrary, size: int, inner: int, *operators: Operator) -> NativeProgram:
    """x [T, size] → its norm, to which ``operators`` add: buffers are x, x narrowed, what comes
    out, and one of the inner size."""
    norm = torch.ones(size)
    first = [
        Operator(kind=Kind.NORM, source=0, out=2, size=size, is_wide=True, norm=norm, eps=1e-6),
        Operator(kind=Kind.NARROW, source=0, out=1, size=size),
    ]
    sizes = [(size, torch.float32), (size, DTYPE), (size, torch.float32), (inner, DTYPE)]
    return NativeProgram(library, [*first, *operators], [Buffer(*each) for each in sizes], 1, 2)


def make_experts(packer: Packer, args: argparse.Namespace) -> NativeProgram:
    size, inner = args.hidden_size, args.inner_size
    router = packer.library.pack(torch.randn(args.experts, size), dtype=torch.float32)
    experts = PackedExperts(
        routing=Routing(args.chosen, min_sum=0.0),
        router=router,
        correction=None,
        gate_up=[packer.pack(2 * inner, size, is_gated=True) for _ in range(args.experts)],
        down=[packer.pack(size, inner) for _ in range(args.experts)],
    )
    operator = Operator(
        kind=Kind.EXPERTS, source=1, second=0, out=2, size=size, experts=experts, adds=True
    )
    return program(packer.library, size, inner, operator)


def make_dense(packer: Packer, args: argparse.Namespace) -> NativeProgram:
    size, inner = args.hidden_size, args.chosen * args.inner_size
    gate_up, down = packer.pack(2 * inner, size, is_gated=True), packer.pack(size, inner)
    return program(
        packer.library,
        size,
        inner,
        Operator(kind=Kind.GATED, source=1, out=3, size=size, weight=gate_up),
        Operator(kind=Kind.LINEAR, source=3, out=2, size=inner, weight=down, adds=True),
    )


def measure_form(form: Quantization, args: argparse.Namespace) -> dict[str, Any]:
    library = NativeLibrary(load_library(args.build), DTYPE, args.threads)
    packer = Packer(library, form)
    experts = make_experts(packer, args)
    num_bytes = packer.num_bytes
    dense = [make_dense(packer, args) for _ in range(args.experts // args.chosen)]
    found = {}
    for num_rows in args.rows:
        seconds: dict[str, list[float]] = {"experts": [], "dense": []}
        for index in range(args.rounds):
            x = torch.randn(num_rows, args.hidden_size)
            seconds["experts"].append(seconds_of(experts, x))
            seconds["dense"].append(seconds_of(dense[index % len(dense)], x))
        share_hit = 1 - (1 - args.chosen / args.experts) ** num_rows
        best = {name: min(each) for name, each in seconds.items()}
        found[f"{num_rows} rows"] = {
            **{name: {"ms": spread([1e3 * each for each in of])} for name, of in seconds.items()},
            "times dense": round(best["experts"] / best["dense"], 2),
            "experts hit": round(share_hit * args.experts, 1),
            "GB/s": round(share_hit * num_bytes / best["experts"] / 1e9, 1),
        }
    return found


def seconds_of(one: NativeProgram, x: Tensor) -> float:
    start = time.perf_counter()
    one.run([x])
    return time.perf_counter() - start


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=2048)
    parser.add_argument("--inner-size", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--chosen", type=int, default=8)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 128, 512])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=["none", "wint8", "wint4"])
    parser.add_argument("--build", choices=variants(), default=find_variant())
    args = parser.parse_args()
    found = {form: measure_form(form, args) for form in args.forms}
    write("experts", {"of": vars(args), "by form": found})

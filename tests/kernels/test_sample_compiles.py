"""Sampling's kernels compile for supported GPUs without spills."""

from typing import Any

import pytest

from benchmarks.gpu.dry_card import MAX_SHARED_BYTES
from kernels.sample import triton as kernels
from tests.kernels.compiled import ARCHS, Kind, compile_kernel
from tests.selection import only

KERNELS = ("stats", "bins", "gather", "finish", "scores")
FILTERS = ("*fp32", "*i32", "*fp32", "*fp32", "*fp32")
MOMENTS = ("*fp32", "*fp32", "*fp32")
DRAWING = {"slots": "*i32", "positions": "*i64", "seeds": "*i64", "choices": "*i32"}
BRACKET = {"pivots": "*fp32", "counts": "*i32", "masses": "*i64"}
LISTS = {"values": "*fp32", "ids": "*i32", "best": "*fp32", "best_id": "*i32"}
PARTS = {"max": "*fp32", "max_id": "*i32", "min": "*fp32", "is_wrong": "*i32"}
POINTERS: dict[str, Kind] = {"filters": FILTERS, "moments": MOMENTS, "temperature": "*fp32"}
POINTERS |= {"logits": "*fp32", "adjusted": "*fp32"}
POINTERS |= {"num_listed": "*i32", "threshold": "*fp32"}
POINTERS |= {"tokens": "*i64", "scores": "*fp32"} | DRAWING | BRACKET | LISTS | PARTS


def constants(vocab_size: int) -> dict[str, Any]:
    num_chunks = -(-vocab_size // kernels.CHUNK)
    return {
        "IS_ADJUSTED": True,
        "CHUNK": kernels.CHUNK,
        "CHUNKS": 1 << (num_chunks - 1).bit_length(),
        "PIVOTS": kernels.NUM_PIVOTS,
        "TILE": kernels.PIVOT_TILE,
        "LISTED": min(kernels.MAX_LISTED, vocab_size),
        "BLOCK": kernels.BLOCK,
    }


@pytest.mark.parametrize("arch", ARCHS)
# The launches of the engine (test_launches.py) have a smaller vocabulary, with and without changes.
@pytest.mark.parametrize(
    ("changed", "name", "vocab_size"),
    only(
        [({}, name, 151936) for name in ("stats", "finish")],
        *([{}, {"p_changed": None}], KERNELS, [8192, 151936]),
    ),
    ids=str,
)
def test_sampling_compiles_without_spills(
    changed: dict[str, None], name: str, vocab_size: int, arch: int
) -> None:
    kernel = getattr(kernels, f"{name}_kernel")
    names = set(kernel.arg_names)
    given = constants(vocab_size) | changed
    own = {each: value for each, value in given.items() if each in names}
    kinds = {f"p_{each}": kind for each, kind in POINTERS.items()}
    kinds |= {"vocab_size": "i32:16", "num_logits": "i32", "num_chunks": "i32"}
    kinds |= {"p_changed": ("*fp32", "*i32")}
    signature = {each: kinds[each] for each in names - set(own)}
    num_warps = kernels.NUM_FINISH_WARPS if name == "finish" else kernels.NUM_WARPS
    taken = compile_kernel(kernel, signature, own, arch, num_warps=num_warps)
    assert taken.num_stack_bytes == 0
    assert taken.shared_bytes <= MAX_SHARED_BYTES[arch]

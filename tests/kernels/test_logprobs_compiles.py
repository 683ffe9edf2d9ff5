"""The kernels of logprobs compile for supported GPUs without spills."""

from typing import Any

import pytest

from benchmarks.gpu.dry_card import MAX_SHARED_BYTES
from kernels.logprobs import triton as kernels
from tests.kernels.compiled import ARCHS, compile_kernel

KINDS = {"p_logits": "*fp32", "p_tokens": "*i64", "p_wants": "*i32", "p_slots": "*i32"}
KINDS |= {"p_max": "*fp32", "p_sum": "*fp32", "p_num_likelier": "*i32", "p_keys": "*i64"}
JOINED = {"p_values": "*fp32", "p_top_ids": "*i32", "p_ranks": "*i32", "num_chunks": "i32"}
VOCAB = {"vocab_size": "i32:16"}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("vocab_size", [8192, 151936])
def test_logprobs_compile_without_spills(vocab_size: int, arch: int) -> None:
    num_chunks = -(-vocab_size // kernels.CHUNK)
    parts: dict[str, Any] = {"CHUNK": kernels.CHUNK, "KEPT": kernels.KEPT}
    joined = {"CHUNKS": 1 << (num_chunks - 1).bit_length(), "KEPT": kernels.KEPT}
    for taken in (
        compile_kernel(kernels._parts, KINDS | VOCAB, parts, arch, num_warps=kernels.NUM_WARPS),
        compile_kernel(
            kernels._join, KINDS | JOINED | VOCAB, joined, arch, num_warps=kernels.NUM_JOIN_WARPS
        ),
    ):
        assert taken.num_stack_bytes == 0
        assert taken.shared_bytes <= MAX_SHARED_BYTES[arch]

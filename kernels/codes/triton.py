"""Dequantization in Triton: within a GEMM, or of a whole weight."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.codes.form import Codes
from kernels.sizes import cdiv

BLOCK_ROWS, BLOCK_K = 16, 256  # of a decoding program; not measured yet
FP8_UNITS = tl.constexpr(2.0**120)  # the ratio of the exponent biases of float32 and float8_e4m3fn
# The group if an output has one scale: larger than any number of inputs.
ALL = tl.constexpr(1 << 30)


class Operands(NamedTuple):
    """The tensors of a weight as kernel arguments; a dense weight has only the first."""

    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    table: Tensor | None = None


class Constants(NamedTuple):
    """Compile-time constants of a weight. ``kind`` is its decoding: "dense", "int8", "fp8",
    "table", or "counted" if the table holds ``first``, ``first`` + 1, …"""

    kind: str = "dense"
    per_place: int = 1  # codes in a byte
    first: float = 0.0
    group: int = ALL.value


DENSE = Constants()


def operands(weight: Tensor | Codes) -> Operands:
    """Raises ValueError if codes, scales or zeros are not contiguous."""
    if not isinstance(weight, Codes):
        return Operands(weight)
    if not all(each is None or each.is_contiguous() for each in weight[:3]):
        raise ValueError("linear: codes, scales and zeros must be contiguous")
    codes = weight.codes
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.int8)  # sm_80 has no float8
    table = weight.table if weight.first is None else None
    return Operands(codes, weight.scales, weight.zeros, table)


def constants(weight: Tensor | Codes) -> Constants:
    if not isinstance(weight, Codes):
        return DENSE
    group = ALL.value if weight.num_groups == 1 else weight.group
    if weight.table is None:
        return Constants("int8" if weight.codes.dtype == torch.int8 else "fp8", group=group)
    if weight.first is None:
        return Constants("table", 2, group=group)
    return Constants("counted", 2, weight.first, group)


def fitting_span(group: int, most: int) -> int:
    """The largest power of 2 up to ``most`` that divides ``group``."""
    return min(group & -group, most)


def launch_decode(codes: Codes, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """[N, inputs] in the order of the codes, or only the rows ``ids`` [T]."""
    num_rows, size = codes.shape
    num_rows = num_rows if ids is None else len(ids)
    out = torch.empty(num_rows, size, dtype=dtype, device=codes.codes.device)
    known = constants(codes)
    block_k = fitting_span(known.group, BLOCK_K)
    decode_kernel[cdiv(num_rows, BLOCK_ROWS), cdiv(size, block_k)](
        *(ids, *operands(codes), out, num_rows, size, *known, BLOCK_ROWS, block_k), num_warps=4
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def decode_kernel(
    p_ids,  # [num_rows], or None for all rows in order
    p_codes,  # [N, K / PER_PLACE]
    p_scales,  # [N, groups]
    p_zeros,  # [N, groups] or None
    p_table,  # [16] or None
    p_out,  # [num_rows, K]
    num_rows,
    K: tl.constexpr,
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # within one group
):
    o_n = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    o_row = tl.minimum(o_n, num_rows - 1)
    if p_ids is not None:
        o_row = tl.load(p_ids + o_row)
    start = tl.program_id(1) * BLOCK_K
    o_place = start // PER_PLACE + tl.arange(0, BLOCK_K // PER_PLACE)
    p_places = p_codes + o_row.to(tl.int64)[:, None] * (K // PER_PLACE) + o_place[None, :]
    b_codes = tl.load(p_places, mask=(o_place < K // PER_PLACE)[None, :], other=0)
    b_values = _numbers(b_codes, p_table, KIND, FIRST)
    o_group = o_row * ((K + GROUP - 1) // GROUP) + start // GROUP
    if p_zeros is not None:
        b_values -= tl.load(p_zeros + o_group).to(tl.float32)[:, None]
    b_values *= tl.load(p_scales + o_group).to(tl.float32)[:, None]
    o_k = start + tl.arange(0, BLOCK_K)
    o_out = o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    is_out = (o_n < num_rows)[:, None] & (o_k < K)[None, :]
    tl.store(p_out + o_out, b_values.to(p_out.dtype.element_ty), mask=is_out)


@triton.jit
def _numbers(b_codes, p_table, KIND: tl.constexpr, FIRST: tl.constexpr):
    """Decoded values before zeros and scales: codes [..., places] → [..., inputs] float32."""
    if KIND == "int8":
        b_numbers = b_codes.to(tl.float32)
    elif KIND == "fp8":
        # Sign, four bits of exponent and three of mantissa, moved to their places in a float32.
        b_bits = (b_codes.to(tl.int32) << 20) & -0x78100000
        b_numbers = b_bits.to(tl.float32, bitcast=True) * FP8_UNITS
    else:
        b_places = tl.interleave(b_codes & 15, b_codes >> 4)
        if KIND == "table":
            b_numbers = tl.load(p_table + b_places.to(tl.int32))
        else:
            b_numbers = b_places.to(tl.float32) + FIRST
    return b_numbers


@triton.jit
def multiply_codes(
    p_x,  # [T, K]
    p_codes,  # [N, K / PER_PLACE]
    p_scales,  # [N, groups]
    p_zeros,  # [N, groups] or None
    p_table,  # [16] or None
    p_order,  # [K] or None: the input of each code
    o_token,  # [BLOCK_T]
    is_token,  # [BLOCK_T]
    o_row,  # [BLOCK_ROWS]
    K: tl.constexpr,
    KIND: tl.constexpr,
    PER_PLACE: tl.constexpr,
    FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,  # four spans, each within one group
    BLOCK_T: tl.constexpr,
):
    """weight[o_row] @ x[o_token].T: [BLOCK_ROWS, BLOCK_T] in float32.

    The four spans are multiplied in parallel: each warp has its own and decodes no code twice.
    Codes without zeros are exact in 16 bits, so the scale is applied to the sum.
    """
    SPAN: tl.constexpr = BLOCK_K // 4
    o_span = tl.arange(0, 4) * SPAN
    o_place = (o_span // PER_PLACE)[:, None] + tl.arange(0, SPAN // PER_PLACE)[None, :]
    o_k = o_span[:, None] + tl.arange(0, SPAN)[None, :]  # [4, SPAN]
    p_rows = p_codes + o_row.to(tl.int64)[None, :, None] * (K // PER_PLACE) + o_place[:, None, :]
    p_tokens = p_x + o_token[None, None, :] * K + o_k[:, :, None]
    b_sums = tl.zeros([4, BLOCK_ROWS, BLOCK_T], tl.float32)
    b_scales = _of_spans(p_scales, o_row, o_span, K, GROUP)
    b_zeros = b_scales
    if p_zeros is not None:
        b_zeros = _of_spans(p_zeros, o_row, o_span, K, GROUP)
    for start in tl.range(0, K, BLOCK_K):
        is_place = (o_place < (K - start) // PER_PLACE)[:, None, :]
        b_codes = tl.load(p_rows + start // PER_PLACE, mask=is_place, other=0)
        is_k = o_k < K - start
        p_each = p_tokens + start
        if p_order is not None:
            o_input = tl.load(p_order + start + o_k, mask=is_k, other=0)
            p_each = p_x + o_token[None, None, :] * K + o_input[:, :, None]
        b_x = tl.load(p_each, mask=is_k[:, :, None] & is_token[None, None, :], other=0)
        b_numbers = _numbers(b_codes, p_table, KIND, FIRST)
        if p_zeros is not None:
            b_numbers -= b_zeros.to(tl.float32)
        b_numbers = b_numbers.to(b_x.dtype)
        if GROUP == ALL:
            b_sums = tl.dot(b_numbers, b_x, b_sums, input_precision="ieee")
        else:
            b_sums += tl.dot(b_numbers, b_x, input_precision="ieee") * b_scales.to(tl.float32)
            # Scales of the next iteration: too few bytes for the copies that Triton pipelines.
            b_scales = _of_spans(p_scales, o_row, start + BLOCK_K + o_span, K, GROUP)
            if p_zeros is not None:
                b_zeros = _of_spans(p_zeros, o_row, start + BLOCK_K + o_span, K, GROUP)
    if GROUP == ALL:
        b_sums *= b_scales.to(tl.float32)
    # Pairs are added explicitly, so the order is the same for every layout of the sums.
    b_pairs = tl.permute(tl.reshape(b_sums, [2, 2, BLOCK_ROWS, BLOCK_T]), [1, 2, 3, 0])
    b_even, b_odd = tl.split(b_pairs)
    b_even, b_odd = tl.split(tl.permute(b_even + b_odd, [1, 2, 0]))
    return b_even + b_odd


@triton.jit
def _of_spans(
    p_each,  # [N, groups]: scales or zeros
    o_row,  # [BLOCK_ROWS]
    o_start,  # [4], the first input of each span
    K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """The scale or zero of each span and row: [4, BLOCK_ROWS, 1]."""
    NUM_GROUPS: tl.constexpr = (K + GROUP - 1) // GROUP
    o_each = (o_row * NUM_GROUPS)[None, :, None] + (o_start // GROUP)[:, None, None]
    return tl.load(p_each + o_each, mask=(o_start < K)[:, None, None], other=0)

"""``short_conv``: one program per token and piece of its channels, in two kernels."""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from kernels.sizes import cdiv

BLOCK = 512  # channels of a program; not measured


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    caches: Sequence[Tensor],
    slot_mapping: Tensor,
    places: Tensor,
) -> Tensor:
    """The arguments of ``short_conv``; places [T, width − 1] int64 of earlier tokens."""
    if not x.is_contiguous():
        raise ValueError("short_conv: x must be contiguous")
    num_tokens, (size, width) = len(x), weight.shape
    out = x.new_empty(num_tokens, size)
    block_size, part = caches[0].shape[1], caches[0][0, 0].numel()
    sizes = [min(part, size - first) for first in range(0, size, part)]
    for number, (cache, channels) in enumerate(zip(caches, sizes, strict=False)):
        grid = num_tokens, cdiv(channels, BLOCK)
        own = number * part, channels, size, part, block_size, cache.stride(0)
        write_kernel[grid](x, cache, slot_mapping, *own, BLOCK)
        conv_kernel[grid](x, weight, bias, cache, slot_mapping, places, out, *own, width, BLOCK)
    return out


@triton.jit
def write_kernel(
    p_x,  # [T, 3 SIZE]
    p_cache,  # [blocks, BLOCK_SIZE, PART], strided
    p_slot_mapping,  # [T]
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = o_channel < CHANNELS
    p_row = p_x + i_token * 3 * SIZE + FIRST + o_channel
    b_gate = tl.load(p_row, mask=is_channel, other=0).to(tl.float32)
    b_input = tl.load(p_row + 2 * SIZE, mask=is_channel, other=0).to(tl.float32)
    slot = tl.load(p_slot_mapping + i_token)
    b_entry = (b_gate * b_input).to(p_cache.dtype.element_ty)
    p_entry = p_cache + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * PART
    tl.store(p_entry + o_channel, b_entry, mask=is_channel)


@triton.jit
def conv_kernel(
    p_x,  # [T, 3 SIZE]
    p_weight,  # [SIZE, WIDTH]
    p_bias,  # [SIZE] or None
    p_cache,  # [blocks, BLOCK_SIZE, PART], strided
    p_slot_mapping,  # [T]
    p_places,  # [T, WIDTH - 1]
    p_out,  # [T, SIZE]
    FIRST: tl.constexpr,
    CHANNELS: tl.constexpr,
    SIZE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_channel = o_channel < CHANNELS
    o_whole = FIRST + o_channel
    b_total = tl.zeros([BLOCK], tl.float32)
    for column in tl.static_range(WIDTH):
        if column < WIDTH - 1:
            place = tl.load(p_places + i_token * (WIDTH - 1) + column)
        else:
            place = tl.load(p_slot_mapping + i_token)
        slot = tl.maximum(place, 0)
        p_entry = p_cache + slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * PART
        b_entry = tl.load(p_entry + o_channel, mask=is_channel, other=0).to(tl.float32)
        b_weight = tl.load(p_weight + o_whole * WIDTH + column, mask=is_channel, other=0)
        b_total += tl.where(place >= 0, b_entry, 0.0) * b_weight.to(tl.float32)
    if p_bias is not None:
        b_total += tl.load(p_bias + o_whole, mask=is_channel, other=0).to(tl.float32)
    b_gate = tl.load(p_x + i_token * 3 * SIZE + SIZE + o_whole, mask=is_channel, other=0)
    b_out = (b_gate.to(tl.float32) * b_total).to(p_out.dtype.element_ty)
    tl.store(p_out + i_token * SIZE + o_whole, b_out, mask=is_channel)

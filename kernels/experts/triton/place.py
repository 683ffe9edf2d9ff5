"""Pairs of a token and one of its experts, ordered by expert and cut into blocks for GEMMs. One
program per expert."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.sizes import next_power_of_2

BLOCK = 1024  # pairs per iteration of a program; not measured yet


class Placed(NamedTuple):
    """Each block has pairs of one expert. Arrays have room for the most possible blocks."""

    pairs: Tensor  # [P] int32: the pairs of the first expert in order, then of the second, …
    blocks: Tensor  # [3, most] int32: each block's expert, its first place in ``pairs``, its end
    num_blocks: Tensor  # [1] int32


def max_blocks(num_pairs: int, num_experts: int, block_size: int) -> int:
    """The most blocks: every used expert may end with a block of one pair."""
    num_hit = min(num_pairs, num_experts)
    return (num_pairs + num_hit * (block_size - 1)) // block_size


def place(chosen: Tensor, num_experts: int, block_size: int, first_expert: int = 0) -> Placed:
    """Orders the pairs of ``chosen`` [T, k] int32, T ≥ 1, that belong to the ``num_experts``
    experts from ``first_expert`` on; expert indices are relative to that."""
    num_pairs = chosen.numel()
    most = max_blocks(num_pairs, num_experts, block_size)
    placed = Placed(chosen.new_empty(num_pairs), chosen.new_empty(3, most), chosen.new_empty(1))
    place_kernel[num_experts,](
        *(chosen, *placed, num_pairs, most, first_expert),
        *(next_power_of_2(num_experts), block_size, BLOCK),
        num_warps=4,
    )
    return placed


@triton.jit(do_not_specialize=["num_pairs", "most", "first_expert"])
def place_kernel(
    p_chosen,  # [P]
    p_pairs,  # [P]
    p_blocks,  # [3, most]
    p_num_blocks,  # [1]
    num_pairs,
    most,
    first_expert,
    BLOCK_E: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,  # pairs in a block
    BLOCK: tl.constexpr,
):
    i_expert = tl.program_id(0)
    o_expert, o_each = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK)
    b_counts = tl.zeros([BLOCK_E], tl.int32)
    for start in tl.range(0, num_pairs, BLOCK):
        is_pair = o_each < num_pairs - start
        b_chosen = tl.load(p_chosen + start + o_each, mask=is_pair, other=-1) - first_expert
        is_here = (b_chosen >= 0) & (b_chosen < tl.num_programs(0))
        b_counts += tl.histogram(tl.where(is_here, b_chosen, 0), BLOCK_E, mask=is_here)
    b_nums = (b_counts + BLOCK_SIZE - 1) // BLOCK_SIZE
    if i_expert == 0:
        tl.store(p_num_blocks, tl.sum(b_nums, 0))
    first = tl.sum(tl.where(o_expert < i_expert, b_counts, 0), 0)
    count = tl.sum(tl.where(o_expert == i_expert, b_counts, 0), 0)
    first_block = tl.sum(tl.where(o_expert < i_expert, b_nums, 0), 0)
    num_blocks = tl.cdiv(count, BLOCK_SIZE)
    for start in tl.range(0, num_blocks, BLOCK):
        is_block = o_each < num_blocks - start
        p_block = p_blocks + first_block + start + o_each
        b_first = first + (start + o_each) * BLOCK_SIZE
        tl.store(p_block, tl.zeros_like(o_each) + i_expert, mask=is_block)
        tl.store(p_block + most, b_first, mask=is_block)
        b_end = tl.minimum(b_first + BLOCK_SIZE, first + count)
        tl.store(p_block + 2 * most, b_end, mask=is_block)
    if count > 0:
        for start in tl.range(0, num_pairs, BLOCK):
            is_pair = o_each < num_pairs - start
            b_chosen = tl.load(p_chosen + start + o_each, mask=is_pair, other=-1) - first_expert
            b_mine = (b_chosen == i_expert).to(tl.int32)
            b_place = first + tl.cumsum(b_mine, 0) - 1
            tl.store(p_pairs + b_place, start + o_each, mask=b_mine == 1)
            first += tl.sum(b_mine, 0)

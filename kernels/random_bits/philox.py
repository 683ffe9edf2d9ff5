"""Philox4x32-10 on int64 tensors.

A word is the lower half of its int64. The upper half may hold anything: only operands of
multiplications and results are masked. Multiplications wrap at 64 bits, whose lower half is right.
"""

from torch import Tensor

from kernels.random_bits.reference import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, Words

MASK = 0xFFFFFFFF


def philox4x32(counter: Words[Tensor], seeds: Tensor) -> Words[Tensor]:
    """Four words for each broadcast element of the counter's words and the int64 ``seeds``."""
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & MASK, (seeds >> 32) & MASK
    for number in range(NUM_ROUNDS):
        product0 = (c0 & MASK) * MULTIPLIERS[0]
        product1 = (c2 & MASK) * MULTIPLIERS[1]
        c0, c1 = (product1 >> 32) ^ c1 ^ (k0 + number * KEY_STEPS[0]), product1
        c2, c3 = (product0 >> 32) ^ c3 ^ (k1 + number * KEY_STEPS[1]), product0
    return c0 & MASK, c1 & MASK, c2 & MASK, c3 & MASK

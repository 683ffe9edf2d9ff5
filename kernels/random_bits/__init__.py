"""Random bits as a function of seed, token, position, choice and purpose, so that sampling can be
replayed.

Philox4x32-10 (Salmon et al., SC 2011) with the seed as key and (token id, position in the whole
sequence, choice, purpose) as counter. ``reference.py`` defines it in numpy; torch serves every
device with the same bits, ``kernels/cpu/noise.h`` CPUs and ``triton.py`` kernels.
"""

from torch import Tensor

from kernels.random_bits.reference import KEY_STEPS, MULTIPLIERS, NUM_ROUNDS, Words

PURPOSE_SAMPLE, PURPOSE_ACCEPT = 0, 1
MASK = 0xFFFFFFFF


def random_bits(
    seeds: Tensor, token_ids: Tensor, positions: Tensor, choices: Tensor, purpose: int
) -> Tensor:
    """32 bits for each element of the broadcast int64 arguments, as int64."""
    counter = (token_ids, positions, choices, seeds.new_tensor(purpose))
    return philox4x32(counter, seeds)[0]


def philox4x32(counter: Words[Tensor], seeds: Tensor) -> Words[Tensor]:
    """Four words for each broadcast element of the counter's words and the int64 ``seeds``.

    A word is the lower half of its int64. The upper half may hold anything: only operands of
    multiplications and results are masked. Multiplications wrap at 64 bits, whose lower half is
    right.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & MASK, (seeds >> 32) & MASK
    for number in range(NUM_ROUNDS):
        product0 = (c0 & MASK) * MULTIPLIERS[0]
        product1 = (c2 & MASK) * MULTIPLIERS[1]
        c0, c1 = (product1 >> 32) ^ c1 ^ (k0 + number * KEY_STEPS[0]), product1
        c2, c3 = (product0 >> 32) ^ c3 ^ (k1 + number * KEY_STEPS[1]), product0
    return c0 & MASK, c1 & MASK, c2 & MASK, c3 & MASK

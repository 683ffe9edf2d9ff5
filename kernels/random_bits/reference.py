"""Reference of the random bits: Philox4x32-10 in numpy (Salmon et al., SC 2011)."""

from typing import TypeVar

import numpy as np

T = TypeVar("T")
Words = tuple[T, T, T, T]

NUM_ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

MASK = np.uint64(0xFFFFFFFF)
HALF = np.uint64(32)


def philox4x32(counter: Words[np.ndarray], seeds: np.ndarray) -> Words[np.ndarray]:
    """Four 32-bit words for each broadcast element; all arrays are uint64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seeds & MASK, seeds >> HALF
    for _ in range(NUM_ROUNDS):
        product0 = c0 * np.uint64(MULTIPLIERS[0])
        product1 = c2 * np.uint64(MULTIPLIERS[1])
        c0, c1 = (product1 >> HALF) ^ c1 ^ k0, product1 & MASK
        c2, c3 = (product0 >> HALF) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + np.uint64(KEY_STEPS[0])) & MASK, (k1 + np.uint64(KEY_STEPS[1])) & MASK
    return c0, c1, c2, c3


def random_bits(
    seeds: np.ndarray,
    token_ids: np.ndarray,
    positions: np.ndarray,
    choices: np.ndarray,
    purpose: int,
) -> np.ndarray:
    """32 bits for each element of the broadcast int64 arguments, as uint64."""
    counter = (
        token_ids.astype(np.uint64),
        positions.astype(np.uint64),
        choices.astype(np.uint64),
        np.array(purpose, np.uint64),
    )
    return philox4x32(counter, seeds.astype(np.uint64))[0]

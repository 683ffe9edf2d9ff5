"""Divergence between two models' distributions of the next token. No IO.

Logprobs of a text of n tokens are [n, 1 + V] float32: the token's own, then those of all ids.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Comparison(NamedTuple):
    """Comparison over n tokens."""

    bits: float  # sum over all tokens
    divergences: np.ndarray  # [n], Kullback–Leibler, in nats
    agrees: np.ndarray  # [n] bool: equal likeliest ids


def compare(reference: np.ndarray, found: np.ndarray) -> Comparison:
    """Compares the logprobs ``found`` with those of ``reference``."""
    wanted, got = reference[:, 1:], found[:, 1:]
    divergences = [
        float(np.exp(p, dtype=np.float64) @ (p - q))  # row by row, since vocabularies are large
        for p, q in zip(wanted, got, strict=True)
    ]
    bits = -float(found[:, 0].sum(dtype=np.float64) / np.log(2))
    return Comparison(bits, np.array(divergences), wanted.argmax(1) == got.argmax(1))


def summary(comparisons: Sequence[Comparison], num_bytes: int) -> dict[str, float]:
    """Figures over texts of ``num_bytes`` in total."""
    divergences = np.concatenate([each.divergences for each in comparisons])
    agrees = np.concatenate([each.agrees for each in comparisons])
    return {
        "bits_per_byte": sum(each.bits for each in comparisons) / num_bytes,
        "kl_divergence": float(divergences.mean()),
        "same_first_choice": float(agrees.mean()),
    }

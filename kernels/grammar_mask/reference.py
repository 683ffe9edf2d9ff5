"""Reference of ``hide``."""

import numpy as np


def masked_row(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """logits [V] with −inf where the bit in ``mask`` [⌈V / 32⌉] int32 is not set."""
    kept = [int(mask[token // 32]) >> (token % 32) & 1 for token in range(len(logits))]
    return np.where(kept, logits, -np.inf)

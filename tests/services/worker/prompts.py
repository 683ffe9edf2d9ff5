"""Random prompts, for processes that need no model of transformers."""

import numpy as np

VOCAB_SIZE = 160


def random_prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Ragged: 1 … 40 ids each."""
    rng = np.random.default_rng(seed)
    lengths = [1, 2, *rng.integers(1, 41, num).tolist()][:num]
    return [rng.integers(8, VOCAB_SIZE, length).tolist() for length in lengths]

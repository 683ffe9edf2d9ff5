"""Attention to latents by Triton's kernels."""

import pytest

from kernels.paged_attention.triton import latent
from tests.kernels.test_latent import (
    test_any_shape_agrees,
    test_edges_of_blocks_and_tiles_agree,
    test_heads_of_the_size_of_deepseek_v3_agree,
    test_quantized_latents_agree,
    test_rows_that_hide_keys_agree,
)

pytest.mark.slow(test_heads_of_the_size_of_deepseek_v3_agree)


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program costs the interpreter half a millisecond, even without keys."""
    monkeypatch.setattr(latent, "MIN_SPLITS", 2)
    monkeypatch.setattr(latent, "MAX_SPLITS", 2)
    monkeypatch.setattr(latent, "SPLIT_KEYS", 16)

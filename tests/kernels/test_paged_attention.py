"""paged_attention against its reference: ragged rows, block edges, shared blocks, all groupings."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_codes import HIGHEST_CODE, quantize
from kernels.paged_attention import (
    PLAIN,
    AttentionOptions,
    grouped,
    paged_attention,
    prepare_attention,
    reference,
)
from kernels.paged_attention import batch as batches
from tests.kernels.attended import ends_of

BLOCK_SIZE = 4
NUM_BLOCKS = 40
HEAD_DIM = 8
CPU = torch.device("cpu")


class Row(NamedTuple):
    num_tokens: int
    num_before: int


def compare(
    rows: list[Row],
    num_heads: int,
    num_kv_heads: int,
    dtype: torch.dtype,
    hides: bool = False,
    options: AttentionOptions = PLAIN,
    codes: torch.dtype | None = None,
    together: int = 0,
) -> int:
    """Asserts that both agree; returns the number of groups. With ``hides`` each row hides keys
    before one visible to its first token. Every second group of ``together`` tokens is an image."""
    rows = sorted(rows, key=lambda row: (row.num_tokens > 1, sum(row)))
    num_tokens = np.array([row.num_tokens for row in rows])
    num_keys = np.array([sum(row) for row in rows])
    tables = np.random.default_rng(len(rows)).integers(0, NUM_BLOCKS, (len(rows), 16))
    cache = torch.randn(NUM_BLOCKS + 1, BLOCK_SIZE, 2, num_kv_heads, HEAD_DIM + 2).to(dtype)
    scales = None
    if codes is not None:
        cache, scales = quantize(cache, codes)
    query = torch.randn(int(num_tokens.sum()), num_heads, HEAD_DIM).to(dtype)
    first_keys = np.arange(len(rows)) % (num_keys - num_tokens + 1) if hides else None
    batch = prepare_attention(num_tokens, num_keys, tables, BLOCK_SIZE, dtype, CPU, first_keys)
    if together:
        own = [ends_of(row.num_before, row.num_tokens, together) for row in rows]
        batch = replace(batch, ends=np.concatenate(own))
    expected = reference.paged_attention(query, cache, batch, HEAD_DIM**-0.5, options, scales)
    actual = paged_attention(query, cache, batch, HEAD_DIM**-0.5, options, scales)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
    return len(batch.groups())


@settings(max_examples=60)
@given(
    rows=st.lists(st.builds(Row, st.integers(1, 12), st.integers(0, 50)), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    hides=st.booleans(),
)
def test_any_mixture_of_rows_agrees(rows: list[Row], heads: tuple[int, int], hides: bool) -> None:
    compare(rows, *heads, torch.float32, hides)


@settings(max_examples=60)
@given(
    rows=st.lists(st.builds(Row, st.integers(1, 12), st.integers(0, 50)), min_size=1, max_size=8),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 2, 5, 30]),
    softcap=st.sampled_from([None, 0.5, 20.0]),
    has_sinks=st.booleans(),
    value_dim=st.sampled_from([None, 3, 10]),
)
def test_every_option_of_attention_agrees(
    rows: list[Row],
    heads: tuple[int, int],
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    value_dim: int | None,
) -> None:
    sinks = torch.randn(heads[0]) if has_sinks else None
    options = AttentionOptions(window, softcap, sinks, value_dim)
    compare(rows, *heads, torch.float32, options=options)


@pytest.mark.parametrize("window", [None, 1, 2, 5, 30])
@pytest.mark.parametrize("together", [1, 3, 4, 50])
def test_tokens_of_images_see_each_other(together: int, window: int | None) -> None:
    rows = [Row(1, 30), Row(1, 0), Row(12, 0), Row(9, 20), Row(40, 17)]
    for options in (AttentionOptions(window), AttentionOptions(window, softcap=0.5)):
        compare(rows, 4, 2, torch.float32, options=options, together=together)


def test_scores_that_are_made_in_pieces_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "MAX_SCORES", 200)
    rows = [Row(1, 30), Row(1, 17), Row(9, 0), Row(5, 20)]
    for options in (AttentionOptions(softcap=0.5), AttentionOptions(5, None, torch.randn(4))):
        compare(rows, 4, 2, torch.float32, options=options)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("num_tokens", [1, 2, 4])
def test_block_edges_agree(length: int, num_tokens: int) -> None:
    compare([Row(num_tokens, length), Row(num_tokens, 0)], 4, 2, torch.float32)


def test_one_two_three_keys_decode_in_one_step() -> None:
    """Three rows of one token, at most three keys: the mask is no triangle."""
    assert compare([Row(1, 0), Row(1, 1), Row(1, 2)], 4, 2, torch.float32) == 1


def test_bfloat16_agrees() -> None:
    compare([Row(1, 30), Row(1, 17), Row(9, 0), Row(5, 20)], 4, 2, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
def test_codes_agree(codes: torch.dtype, dtype: torch.dtype) -> None:
    rows = [Row(1, 30), Row(1, 17), Row(9, 0), Row(5, 20)]
    compare(rows, 4, 2, dtype, codes=codes)
    compare(rows, 4, 2, dtype, options=AttentionOptions(5, 20.0, torch.randn(4), 10), codes=codes)


def test_decode_rows_are_attended_to_together_unless_one_is_much_longer() -> None:
    assert compare([Row(1, 20), Row(1, 24), Row(1, 30)], 4, 2, torch.float32) == 1
    assert compare([Row(1, 3), Row(1, 4), Row(1, 50)], 4, 2, torch.float32) == 2


def test_gathered_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_GATHERED_TOKENS", 100)
    assert compare([Row(1, 39)] * 7, 4, 2, torch.float32) == 4


def test_no_rows_are_fine() -> None:
    nothing = np.zeros(0, np.int64)
    tables = np.zeros((0, 4), np.int64)
    batch = prepare_attention(nothing, nothing, tables, BLOCK_SIZE, torch.float32, CPU)
    cache = torch.zeros(2, BLOCK_SIZE, 2, 2, HEAD_DIM)
    assert paged_attention(torch.zeros(0, 4, HEAD_DIM), cache, batch, 1.0).shape == (0, 4, HEAD_DIM)

"""The kernels of attend against the reference of paged attention."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import switches
from kernels.kv_codes import HIGHEST_CODE
from kernels.paged_attention import PLAIN, TILE, AttentionOptions, attend, triton
from tests.kernels.attended import (
    Heads,
    Step,
    assert_later_tokens_do_not_matter,
    assert_padding_changes_nothing,
    assert_passed_blocks_do_not_matter,
    attended_chunks,
    compare,
    device_attention,
    every_option,
    random_cache,
)
from tests.selection import every_pair

TOLERANCE = 1e-5
BFLOAT16_TOLERANCE = 2e-2
SMALL = Heads(4, 2, 16)
LATENTS = AttentionOptions(value_dim=32)
codes = pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)


@pytest.fixture(autouse=True)
def _few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program costs the interpreter half a millisecond, even without keys."""
    monkeypatch.setattr(triton, "NUM_SPLITS", 2)
    monkeypatch.setattr(switches, "SPLIT_KEYS", 16)


@pytest.mark.parametrize("width", [1, 2, 5])
def test_edges_of_blocks_and_tiles_agree(width: int) -> None:
    starts = [0, 1, 14, 15, 16, 31, 32, 63]
    compare(Step(starts, width, block_size=16), SMALL, TOLERANCE)


@pytest.mark.parametrize("window", [None, 5, 30])
@pytest.mark.parametrize("together", [7, 50])
def test_tokens_of_images_see_each_other(together: int, window: int | None) -> None:
    step = Step([20], 2, [(0, 150), (17, 9)], block_size=16, together=together)
    compare(step, SMALL, TOLERANCE, options=AttentionOptions(window))


@pytest.mark.parametrize(
    ("group_size", "hides"), [(1, False), (3, True), (4, False), (8, True), (20, False), (20, True)]
)
def test_any_group_of_heads_agrees(group_size: int, hides: bool) -> None:
    heads = Heads(group_size, 1, 16)
    compare(Step([0, 37], 2, [(20, 3)], hides=hides), heads, TOLERANCE)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [*((size, torch.float32) for size in (64, 80, 96, 128, 256)), (80, torch.bfloat16)],
)
def test_any_head_size_agrees(head_dim: int, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    step = Step([70], 3, [(5, 20)], block_size=16)
    compare(step, Heads(4, 1, head_dim), tolerance, dtype)


@pytest.mark.parametrize("width", [4, 9, 17])
def test_more_queries_than_a_program_takes_agree(width: int) -> None:
    compare(Step([3, 40], width), Heads(8, 1, 16), TOLERANCE)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16, 64])
def test_any_block_size_agrees(block_size: int) -> None:
    compare(Step([20, 5], 3, [(2, 9)], block_size=block_size), SMALL, TOLERANCE)


@pytest.mark.parametrize(("num_splits", "split_keys"), [(1, 16), (2, 32), (4, 16), (16, 48)])
def test_any_splits_agree(
    num_splits: int, split_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "NUM_SPLITS", num_splits)
    monkeypatch.setattr(switches, "SPLIT_KEYS", split_keys)
    compare(Step([62, 63, 64, 200, 3], 2, block_size=16), SMALL, TOLERANCE)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    ("heads", "options", "num_planes"),
    [(SMALL, PLAIN, 2), (SMALL, every_option(4), 2), (Heads(4, 1, 40), LATENTS, 1)],
    ids=["no options", "every option", "latents"],
)
def test_padding_changes_no_bit(
    heads: Heads,
    options: AttentionOptions,
    num_planes: int,
    width: int,
) -> None:
    assert_padding_changes_nothing(heads, width, options, num_planes)


@pytest.mark.parametrize("hides", [False, True])
def test_chunks_of_any_length_agree(hides: bool) -> None:
    lengths = (1, 15, 16, 17, 33, TILE, TILE + 1)
    chunks = [*((0, length) for length in lengths), (7, 3), (33, 1)]
    compare(Step(chunks=chunks, block_size=16, hides=hides), SMALL, TOLERANCE)


def test_chunks_in_bfloat16_agree() -> None:
    step = Step(chunks=[(0, TILE + 5), (90, 70)], block_size=16)
    compare(step, SMALL, BFLOAT16_TOLERANCE, torch.bfloat16)


@pytest.mark.parametrize(
    ("num_kv_heads", "options"),
    [(2, every_option(12)), (3, AttentionOptions(17)), (12, PLAIN)],
    ids=["every option", "window", "no options"],
)
def test_any_heads_of_a_program_give_the_same_bits(
    num_kv_heads: int, options: AttentionOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six heads per KV head, at most two, four or one of them together."""
    heads = Heads(12, num_kv_heads, 16)
    attend_chunks = attended_chunks(heads, [(0, 33), (7, 3)], options)
    monkeypatch.setattr(switches, "PROMPT_HEADS", 1)
    expected = attend_chunks()
    for num_heads in (2, 4):
        monkeypatch.setattr(switches, "PROMPT_HEADS", num_heads)
        assert torch.equal(attend_chunks(), expected)


@pytest.mark.parametrize("num_tokens", [1, 5, 16, 17, 33, 63])
def test_a_chunk_in_pieces_has_the_same_bits(num_tokens: int) -> None:
    """For any first token of a program."""
    heads, num_keys = Heads(8, 2, 16), 64
    tables, cache = random_cache(Step(chunks=[(0, num_keys)], block_size=16), heads, torch.float32)
    query = torch.randn(num_keys, *heads[::2])

    def attended(start: int, end: int) -> torch.Tensor:
        step = Step(chunks=[(start, end - start)], block_size=16)
        return attend(query[start:end], cache, device_attention(step, tables), 1.0)

    parts = [attended(0, num_tokens), attended(num_tokens, num_keys)]
    assert torch.equal(torch.cat(parts), attended(0, num_keys))


@pytest.mark.filterwarnings("ignore:invalid value")  # from the last token, which sees them
@pytest.mark.parametrize("codes", [None, *HIGHEST_CODE], ids=str)
def test_later_tokens_do_not_matter(codes: torch.dtype | None) -> None:
    assert_later_tokens_do_not_matter(SMALL, codes)


@pytest.mark.parametrize(
    ("options", "dtype", "codes"),
    every_pair(
        [PLAIN, AttentionOptions(17), every_option(4)],
        [torch.float32, torch.bfloat16, torch.float16],
        [*HIGHEST_CODE],
    ),
)
def test_codes_agree(options: AttentionOptions, dtype: torch.dtype, codes: torch.dtype) -> None:
    tolerance = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    for hides in (False, True):
        step = Step([0, 37], 2, [(0, 20), (20, 3)], block_size=16, hides=hides)
        compare(step, SMALL, tolerance, dtype, options=options, codes=codes)


@codes
@pytest.mark.parametrize("head_dim", [80, 256])
def test_codes_of_any_head_size_agree(head_dim: int, codes: torch.dtype) -> None:
    step = Step([70], 3, [(5, 20)], block_size=16)
    compare(step, Heads(4, 1, head_dim), TOLERANCE, codes=codes)


@pytest.mark.parametrize(
    ("window", "width"), [*((window, 1) for window in (1, 2, 16, 17, 48)), (16, 5), (17, 5)]
)
def test_windows_agree_in_rows_that_decode(window: int, width: int) -> None:
    """Smaller than a tile, at its edge, over several tiles, and larger than the context."""
    options = AttentionOptions(window)
    for hides in (False, True):
        step = Step([0, 16, 47, 70], width, block_size=16, hides=hides)
        compare(step, SMALL, TOLERANCE, options=options)


@pytest.mark.parametrize(
    ("num_splits", "split_keys", "window"),
    [(1, 16, 33), (2, 32, 33), (4, 16, 33), (16, 48, 33), (2, 32, 150)],
)
def test_windows_agree_over_any_splits(
    num_splits: int, split_keys: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "NUM_SPLITS", num_splits)
    monkeypatch.setattr(switches, "SPLIT_KEYS", split_keys)
    step = Step([30, 64, 200, 330], 2, block_size=16)
    compare(step, SMALL, TOLERANCE, options=AttentionOptions(window))


@pytest.mark.parametrize(
    ("window", "hides"),
    [(1, True), (16, False), (17, True), (40, False), (1000, False), (1000, True)],
)
def test_windows_agree_in_chunks(window: int, hides: bool) -> None:
    step = Step(chunks=[(0, 17), (33, 1), (50, 40)], block_size=16, hides=hides)
    compare(step, SMALL, TOLERANCE, options=AttentionOptions(window))


@pytest.mark.parametrize(("window", "codes"), [(1, None), (130, None), (48, torch.int8)], ids=str)
def test_blocks_behind_the_window_may_be_given_back(window: int, codes: torch.dtype | None) -> None:
    assert_passed_blocks_do_not_matter(window, codes=codes)


EVERY = every_option(4)
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": EVERY.softcap},
    "weak softcap": {"softcap": 50.0},
    "sinks": {"sinks": EVERY.sinks},
    "strong sinks": {"sinks": torch.full((4,), 30.0)},
    "small values": {"value_dim": 12},
    "large values": {"value_dim": 40},
    "all": EVERY._asdict(),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, torch.float32) for name in OPTIONS), ("all", torch.bfloat16)],
    ids=str,
)
def test_every_option_agrees(name: str, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE if dtype == torch.float32 else BFLOAT16_TOLERANCE
    step = Step([0, 37], 2, [(0, 20), (20, 3)], block_size=16, hides=True)
    compare(step, SMALL, tolerance, dtype, options=AttentionOptions(**OPTIONS[name]))


def test_options_agree_where_heads_are_wide() -> None:
    step = Step([70], 3, [(5, 20)], block_size=16)
    compare(step, Heads(2, 2, 192), TOLERANCE, options=AttentionOptions(value_dim=128, window=40))


def test_too_few_arrivals_are_an_error() -> None:
    step = Step([3, 40])
    tables, cache = random_cache(step, SMALL, torch.float32)
    attention = device_attention(step, tables)
    assert attention.decode is not None
    rows = replace(attention.decode, arrivals=attention.decode.arrivals[:3])
    query = torch.randn(2, 4, 16)
    with pytest.raises(ValueError, match="3 are fewer than 2 × 2"):
        attend(query, cache, replace(attention, decode=rows), 1.0)


def test_nothing_has_no_result() -> None:
    compare(Step(), SMALL, TOLERANCE)

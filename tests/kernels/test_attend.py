"""attend in torch against the reference of paged attention."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import switches
from kernels.kv_codes import HIGHEST_CODE
from kernels.paged_attention import PLAIN, TILE, AttentionOptions, make_tiles
from tests.kernels.attended import (
    Heads,
    Step,
    assert_later_tokens_do_not_matter,
    assert_passed_blocks_do_not_matter,
    attended_chunks,
    compare,
    decoded_rows,
    every_option,
)

TOLERANCE = 1e-5
codes = pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)


@settings(max_examples=40)
@given(
    step=st.builds(
        Step,
        starts=st.lists(st.integers(0, 40), max_size=4),
        width=st.integers(1, 5),
        chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=3),
        block_size=st.sampled_from([3, 4, 16]),
        hides=st.booleans(),
        together=st.sampled_from([0, 2, 7]),
    ),
    heads=st.sampled_from([Heads(4, 4, 8), Heads(4, 2, 8), Heads(6, 2, 16), Heads(3, 1, 8)]),
)
def test_any_step_agrees(step: Step, heads: Heads) -> None:
    compare(step, heads, TOLERANCE)


@codes
@pytest.mark.parametrize("start", [0, 3, 4, 5])
def test_codes_agree(start: int, codes: torch.dtype) -> None:
    step = Step([start, 20], 2, [(start, 9)], hides=start == 4)
    compare(step, Heads(4, 2, 16), TOLERANCE, options=every_option(4), codes=codes)
    compare(step, Heads(4, 2, 8), 2e-2, torch.bfloat16, codes=codes)


@settings(max_examples=40)
@given(
    step=st.builds(
        Step,
        starts=st.lists(st.integers(0, 40), max_size=4),
        width=st.integers(1, 5),
        chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=3),
        block_size=st.sampled_from([4, 16]),
        hides=st.booleans(),
        together=st.sampled_from([0, 2, 7]),
    ),
    heads=st.sampled_from([Heads(4, 4, 8), Heads(6, 2, 16)]),
    window=st.sampled_from([None, 1, 2, 4, 5, 30, 100]),
    softcap=st.sampled_from([None, 0.5, 20.0]),
    has_sinks=st.booleans(),
    value_dim=st.sampled_from([None, 3, 24]),
)
def test_any_step_agrees_with_every_option(
    step: Step,
    heads: Heads,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    value_dim: int | None,
) -> None:
    sinks = torch.randn(heads.num_heads) if has_sinks else None
    options = AttentionOptions(window, softcap, sinks, value_dim)
    compare(step, heads, TOLERANCE, options=options)


@pytest.mark.parametrize("window", [None, 1, 5, 30])
@pytest.mark.parametrize("together", [1, 4, 50])
def test_tokens_of_images_see_each_other(together: int, window: int | None) -> None:
    step = Step([3, 20], 2, [(0, 40), (17, 9)], together=together)
    compare(step, Heads(4, 2, 8), TOLERANCE, options=AttentionOptions(window))


@pytest.mark.parametrize("start", [0, 3, 4, 5])
def test_bfloat16_agrees(start: int) -> None:
    compare(Step([start, 20], 2, [(start, 9)]), Heads(4, 2, 8), 2e-2, torch.bfloat16)


@pytest.mark.parametrize("codes", [None, *HIGHEST_CODE], ids=str)
def test_later_tokens_do_not_matter(codes: torch.dtype | None) -> None:
    assert_later_tokens_do_not_matter(Heads(4, 2, 8), codes)


@pytest.mark.parametrize("codes", [None, *HIGHEST_CODE], ids=str)
@pytest.mark.parametrize("window", [1, 48, 130])
def test_blocks_behind_the_window_may_be_given_back(window: int, codes: torch.dtype | None) -> None:
    assert_passed_blocks_do_not_matter(window, codes=codes)


# Each is compiled: other models' heads need not have every width.
ON_CARDS = [(Heads(32, 8, 128), width) for width in (1, 3, 4, 17)]
ON_CARDS += [(Heads(4, 2, 64), 1), (Heads(8, 2, 96), 3)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("heads", "width"), ON_CARDS, ids=str)
def test_cards_agree(heads: Heads, width: int, dtype: torch.dtype) -> None:
    step = Step([0, 17, 300], width, [(0, 140), (130, 20)], block_size=16, hides=width == 3)
    compare(
        step, heads, 2e-2 if dtype == torch.bfloat16 else TOLERANCE, dtype, torch.device("cuda")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_tokens_of_images_see_each_other_on_cards(window: int | None, dtype: torch.dtype) -> None:
    step = Step([17], 1, [(0, 700), (130, 300)], block_size=16, together=256)
    tolerance = 2e-2 if dtype == torch.bfloat16 else TOLERANCE
    options, device = AttentionOptions(window), torch.device("cuda")
    compare(step, Heads(8, 4, 256), tolerance, dtype, device, options)


@pytest.mark.gpu
@codes
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [1, 3])
def test_cards_agree_with_codes(width: int, dtype: torch.dtype, codes: torch.dtype) -> None:
    step = Step([0, 17, 300], width, [(0, 140), (130, 20)], block_size=16, hides=width == 3)
    tolerance = TOLERANCE if dtype == torch.float32 else 2e-2
    compare(step, Heads(16, 4, 64), tolerance, dtype, torch.device("cuda"), codes=codes)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["window", "softcap", "sinks", "value_dim", "all"])
def test_cards_agree_with_options(name: str, width: int, dtype: torch.dtype) -> None:
    heads, every = Heads(16, 4, 64), every_option(16)._replace(window=100)
    options = every if name == "all" else AttentionOptions(**{name: getattr(every, name)})
    step = Step([0, 17, 300], width, [(0, 140), (130, 20)], block_size=16, hides=width == 3)
    tolerance = 2e-2 if dtype == torch.bfloat16 else TOLERANCE
    compare(step, heads, tolerance, dtype, torch.device("cuda"), options)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [None, *HIGHEST_CODE], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_blocks_behind_the_window_may_be_given_back_on_cards(
    dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    assert_passed_blocks_do_not_matter(48, dtype, torch.device("cuda"), codes)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 4, 17])
def test_cards_add_splits_up_whoever_comes_last(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Repeated runs give the same bits."""
    monkeypatch.setattr(switches, "SPLIT_KEYS", 64)
    cuda = torch.device("cuda")
    decode = decoded_rows(Heads(32, 8, 128), width, 64, torch.bfloat16, cuda)
    expected = decode(64)
    for _ in range(100):
        assert torch.equal(decode(64), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [2, 4])
def test_cards_give_the_same_bits_with_any_heads_of_a_program(
    num_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [(0, 140), (130, 20), (70, 1)]
    cuda = torch.device("cuda")
    attend_chunks = attended_chunks(Heads(32, 8, 128), chunks, PLAIN, torch.bfloat16, cuda)
    monkeypatch.setattr(switches, "PROMPT_HEADS", 1)
    expected = attend_chunks()
    monkeypatch.setattr(switches, "PROMPT_HEADS", num_heads)
    assert torch.equal(attend_chunks(), expected)


def test_every_token_of_a_chunk_has_a_tile() -> None:
    rows, starts = make_tiles(np.array([1, TILE, 2 * TILE + 1]))
    assert rows.tolist() == [0, 1, 2, 2, 2]
    assert starts.tolist() == [0, 0, 0, TILE, 2 * TILE]


def test_no_chunks_have_no_tiles() -> None:
    assert [len(tiles) for tiles in make_tiles(np.zeros(0, np.int64))] == [0, 0]

"""Pieces of text joined are the text, however the ids are cut."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.detokenize import REPLACEMENT, Detokenizer
from tests.services.tokenizer.conftest import SAMPLE


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    texts = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*texts, detokenizer.flush()]


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 1000), max_size=60))
def test_joined_pieces_are_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]):
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids, cuts)) == text


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer):
    ids = tokenizer.encode(SAMPLE).ids
    for piece in pieces(tokenizer, ids, list(range(len(ids)))):
        assert REPLACEMENT not in piece


def test_an_incomplete_character_at_the_end_is_replaced_on_flush(tokenizer: Tokenizer):
    ids = tokenizer.encode("ab👩").ids[:-1]
    assert "".join(pieces(tokenizer, ids, [])) == tokenizer.decode(ids) != "ab"


def test_bytes_that_are_no_character_do_not_hold_text_back_for_ever(tokenizer: Tokenizer):
    lone_byte = tokenizer.encode("é").ids[-1]
    detokenizer = Detokenizer(tokenizer.decode)
    emitted = "".join(detokenizer.push([lone_byte]) for _ in range(50))
    assert len(emitted) > 40


def test_special_tokens_are_silent(tokenizer: Tokenizer):
    ids = [*tokenizer.encode("one").ids, tokenizer.token_to_id("<|end|>")]
    assert "".join(pieces(tokenizer, ids, [1, 2])) == "one"


def test_special_tokens_for_ever_keep_the_window_short(tokenizer: Tokenizer):
    special = tokenizer.token_to_id("<|end|>")
    detokenizer = Detokenizer(tokenizer.decode)
    detokenizer.push(tokenizer.encode("one").ids)
    for _ in range(1000):
        detokenizer.push([special])
    assert len(detokenizer._window) < 100
    assert detokenizer.push(tokenizer.encode(" two").ids) == " two"

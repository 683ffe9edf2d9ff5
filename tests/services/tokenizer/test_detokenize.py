"""Joined pieces of text equal the text, for any cut of the ids."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.tokenizer.detokenize import REPLACEMENT, Detokenizer, seam_of, token_bytes
from shared.text.utf8 import num_half_bytes
from tests.services.tokenizer.conftest import SAMPLE


def pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer.decode)
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    texts = [detokenizer.push(ids[a:b]) for a, b in pairwise(edges)]
    return [*texts, detokenizer.flush()]


@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 1000), max_size=60))
@example(text=REPLACEMENT * 60 + "世", cuts=[])
@example(text="0" * 11 + "\x80" * 13 + "𐀀" * 7, cuts=[])  # each piece of ids cuts a character
def test_joined_pieces_are_the_text(tokenizer: Tokenizer, text: str, cuts: list[int]):
    ids = tokenizer.encode(text).ids
    assert "".join(pieces(tokenizer, ids, cuts)) == text


def test_no_piece_holds_half_a_character(tokenizer: Tokenizer):
    ids = tokenizer.encode(SAMPLE).ids
    for piece in pieces(tokenizer, ids, list(range(len(ids)))):
        assert REPLACEMENT not in piece


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("num_ids", [1, 3, 16, 1000])
def test_characters_that_are_cut_by_every_id_come_out_whole(num_bytes: int, num_ids: int):
    """In a byte vocabulary a token may join the end of a character and the beginning of the
    next."""
    text = "a" + "世" * 200 + "𐀀" * 200
    data = text.encode()
    tokens = [data[start : start + num_bytes] for start in range(0, len(data), num_bytes)]
    detokenizer = Detokenizer(lambda ids: b"".join(tokens[i] for i in ids).decode(errors="replace"))
    ids = range(len(tokens))
    found = [detokenizer.push(ids[start : start + num_ids]) for start in ids[::num_ids]]
    assert "".join(found) + detokenizer.flush() == text


@given(text=st.text("ab 世\U0001f469c", max_size=12), data=st.data())
def test_prompt_and_text_match_all_ids(
    tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer, text: str, data: st.DataObject
):
    """For any end of the prompt: at a blank, between the bytes of a character, before a word."""
    for each in (tokenizer, byte_fallback_tokenizer):
        ids = each.encode(text).ids
        end = data.draw(st.integers(0, len(ids)))
        written = token_bytes(each, each.get_vocab_size())
        prompt = b"".join(written[token_id] for token_id in ids[:end])
        seam = seam_of(ids[:end], written)
        detokenizer = Detokenizer(each.decode, seam)
        pushed = "".join(detokenizer.push([token_id]) for token_id in ids[end:])
        found = pushed + detokenizer.flush()
        before = len(prompt[: len(prompt) - num_half_bytes(prompt)].decode())
        if each is byte_fallback_tokenizer and text:
            before = max(0, before - 1)  # the blank its normalizer prepends
        assert found == each.decode(ids)[before:]


def test_an_incomplete_character_at_the_end_is_replaced_on_flush(tokenizer: Tokenizer):
    ids = tokenizer.encode("ab👩").ids[:-1]
    assert "".join(pieces(tokenizer, ids, [])) == tokenizer.decode(ids) != "ab"


def test_bytes_that_are_no_character_do_not_hold_text_back_for_ever(tokenizer: Tokenizer):
    lone_byte = tokenizer.encode("ê").ids[-1]
    detokenizer = Detokenizer(tokenizer.decode)
    emitted = "".join(detokenizer.push([lone_byte]) for _ in range(1000))
    assert len(emitted) > 900
    assert detokenizer.push(tokenizer.encode("a").ids).endswith(REPLACEMENT + "a")


def chunks(tokenizer: Tokenizer, ids: list[int], num_ids: int) -> list[str]:
    return pieces(tokenizer, ids, list(range(0, len(ids), num_ids)))


@pytest.mark.parametrize("num_ids", [1, 3, 16])
@given(text=st.text(st.sampled_from("ab  \n世界é😀𐀀"), max_size=200))
@example(text="a😀b")
@example(text="a b  a")
@example(text="  a 世 😀 a")
@example(text="a" + "é界😀" * 100)  # one run of bytes, cut at all places
@example(text="a" * 15 + "界" * 100 + " a")
def test_runs_of_byte_tokens_come_out_as_whole_characters(
    byte_fallback_tokenizer: Tokenizer, text: str, num_ids: int
):
    ids = byte_fallback_tokenizer.encode(text).ids
    found = chunks(byte_fallback_tokenizer, ids, num_ids)
    assert "".join(found) == byte_fallback_tokenizer.decode(ids) == text


def test_a_character_of_byte_tokens_goes_out_with_its_last_byte(byte_fallback_tokenizer: Tokenizer):
    ids = byte_fallback_tokenizer.encode("a😀界b").ids
    found = chunks(byte_fallback_tokenizer, ids, 1)
    assert [piece for piece in found if piece] == ["a", "😀", "界", "b"]


def test_a_cut_run_of_byte_tokens_replaces_only_unsent_text(
    byte_fallback_tokenizer: Tokenizer,
):
    ids = byte_fallback_tokenizer.encode("a😀界😀").ids[:-2]
    assert "".join(chunks(byte_fallback_tokenizer, ids, 1)) == "a😀界" + REPLACEMENT * 2


@pytest.mark.parametrize("num_ids", [1, 3, 16])
@pytest.mark.parametrize("bad", [["<0xFF>"], ["<0xE7>", "<0xFF>"], ["<0xFF>"] * 100])
def test_text_behind_byte_tokens_that_are_no_character_is_not_lost(
    byte_fallback_tokenizer: Tokenizer, bad: list[str], num_ids: int
):
    bad_ids = [byte_fallback_tokenizer.token_to_id(token) for token in bad]
    run = byte_fallback_tokenizer.encode("界" * 100).ids[1:]
    rest = byte_fallback_tokenizer.encode("a 世 ab 😀 c").ids
    found = "".join(chunks(byte_fallback_tokenizer, [*bad_ids, *run, *rest], num_ids))
    assert found.endswith(" a 世 ab 😀 c")


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

"""Lone surrogates anywhere in JSON."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text import surrogates
from shared.text.surrogates import without_escaped_halves, without_halves

PIECES = ["a", "\\", '"', "\n", "é", "😀", "\ud83d", "\ude00", "ud83d"]


def expected(text: str) -> str:
    """Pairs are joined, as in every JSON reader."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


@given(st.lists(st.sampled_from(PIECES)), st.booleans())
def test_only_halves_are_replaced(pieces: list[str], is_upper: bool):
    text = "".join(pieces)
    data = json.dumps({text: text}).encode()
    if is_upper:
        data = data.replace(b"\\ud", b"\\uD")
    joined = expected(text)
    if "\\ud" in text:  # an escaped backslash in front of a false escape
        assert msgspec.json.decode(without_escaped_halves(json.dumps(text).encode())) == joined
    else:
        assert msgspec.json.decode(without_escaped_halves(data)) == {joined: joined}


def test_text_without_half_surrogates_is_not_copied():
    for data in (b'{"a": "\\n"}', b'"\\ud83d\\ude00"', b'"\\\\ud83d"'):
        assert without_escaped_halves(data) is data


@pytest.mark.parametrize("data", [b"\\ud", b"\\", b'"\\ud83d', b"\\ud8zz", b"\xff\\ud83d\\"])
def test_malformed_json_goes_through(data: bytes):
    assert len(without_escaped_halves(data)) == len(data)


@pytest.mark.parametrize("num", range(9))
def test_halves_across_pieces_are_found(monkeypatch: pytest.MonkeyPatch, num: int):
    monkeypatch.setattr(surrogates, "CALL_BYTES", 5)
    for half in (b"\\ud83d", b"\\uD83D"):
        data = b"a" * num + half + b"a"
        assert without_escaped_halves(data) == data.replace(half, b"\\ufffd")


def test_many_halves_are_left(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(surrogates, "MAX_HALVES", 2)
    assert without_escaped_halves(b"\\ud83d" * 3) == b"\\ufffd" * 2 + b"\\ud83d"


def test_a_text_is_mended_too():
    assert without_halves("a\ud83d😀\ude00b") == "a\ufffd😀\ufffdb"

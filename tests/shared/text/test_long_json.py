"""Decoding in slices equals decoding at once."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.text import json_scan, long_json
from shared.text.json_scan import TooManyValues, num_values, slices
from shared.text.long_json import decode, decode_text, encode_text, stripped

ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
TEXTS = st.text('\\"[]{},:a\n\u00e9\u20ac\U0001f41f\u2028')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)
SIZES = st.sampled_from([(1, 20), (2, 24), (7, 30), (50, 50)])  # of pieces and of calls


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_json, "CALL_BYTES", 24)
    for module in (json_scan, long_json):
        monkeypatch.setattr(module, "PIECE_BYTES", 7)


def result(read: Any, text: bytes) -> Any:
    try:
        return "value", read(text)
    except ERRORS:
        return "error"


@given(VALUES, st.booleans(), st.sampled_from([None, 1, "\t"]))
def test_values_are_the_same(value: Any, ensure_ascii: bool, indent: Any) -> None:
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent).encode()
    assert decode(memoryview(text)) == value


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from(["", "a", '"', ", []", '\\"']))
def test_long_texts_are_passed_over(num: int, num_escaped: int, behind: str) -> None:
    text = "," * num + "\\" * num_escaped + behind
    values = [text, {text: [text, 1]}, text]
    whole = json.dumps(values).encode()
    found = [bytes(each) for each in slices(memoryview(whole))]
    assert [item for each in found for item in json.loads(b"[%b]" % each)] == values
    assert decode(memoryview(whole)) == values
    assert num_values(memoryview(whole), 9) == 7


def test_no_piece_inside_of_a_text_is_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    scanned: list[bytes] = []
    scan = json_scan._Scan._in_strings

    def in_strings(self: Any, piece: Any) -> Any:
        scanned.append(piece.tobytes())
        return scan(self, piece)

    monkeypatch.setattr(json_scan._Scan, "_in_strings", in_strings)
    assert num_values(memoryview(b'{"a": "%b"}' % (b",[\\\\" * 70)), 9) == 2
    assert scanned == [b'{"a": "', b'"}']


@given(VALUES, st.data())
def test_malformed_json_is_malformed_in_slices_too(value: Any, data: st.DataObject) -> None:
    text = bytearray(json.dumps(value).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(text) - 1))
        text[place] = data.draw(st.sampled_from(b'[]{},:"\\ a1'))
    found = result(lambda text: decode(memoryview(text)), bytes(text))
    assert found == result(msgspec.json.decode, bytes(text))


@given(TEXTS, st.booleans())
def test_texts_are_cut_between_characters(text: str, ensure_ascii: bool) -> None:
    assert decode_text(memoryview(json.dumps(text, ensure_ascii=ensure_ascii).encode())) == text
    assert bytes(memoryview(encode_text(text))) == msgspec.json.encode(text)


@given(st.lists(VALUES, min_size=1))
def test_slices_are_whole_items(values: list[Any]) -> None:
    found = list(slices(memoryview(json.dumps(values).encode())))
    assert [item for each in found for item in json.loads(b"[%b]" % bytes(each))] == values
    assert all(
        each.nbytes <= json_scan.PIECE_BYTES or len(json.loads(b"[%b]" % bytes(each))) == 1
        for each in found
        if len(values) > 1
    )


def test_values_in_strings_do_not_count() -> None:
    text = memoryview(rb'{"a": ["[[\",:,{\\\\", 1, {"b": "\\"}], "c": 2}')
    assert num_values(text, 9) == 9  # three commas, three colons, three brackets
    with pytest.raises(TooManyValues):
        num_values(text, 8)


@given(st.text(" \t\r\n"), st.text("a ", min_size=1), st.text(" \t\r\n"))
def test_blanks_around_a_text_go(before: str, text: str, behind: str) -> None:
    whole = f"{before}{text}{behind}"
    assert bytes(stripped(memoryview(whole.encode()))) == whole.strip().encode()

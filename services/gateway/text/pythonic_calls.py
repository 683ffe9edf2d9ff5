"""Calls in Python's syntax; their literals become JSON as they come."""

import re
from contextlib import suppress
from math import isfinite
from string import hexdigits

from services.gateway.text.context import CallContext
from services.gateway.text.source import Broken, Waiting
from services.gateway.text.value_types import json_string
from shared.dialects.formats import PythonicLayout

_WORD = re.compile(r"[^\s,:=\[\](){}'\"<]+")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_HEX = frozenset(hexdigits)
_CLOSES = {"[": "]", "(": "]", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}


class PythonicCalls:
    def __init__(self, context: CallContext, layout: PythonicLayout) -> None:
        self._context = context
        self._source = context.source
        self._layout = layout

    def read(self, is_tagless: bool) -> Waiting[None]:
        """All calls; ``is_tagless``: no marker came, so each must name an existing function."""
        yield from self._source.skip_blanks()
        if self._layout.open:
            yield from self._expect(self._layout.open)
        while True:
            yield from self._read_call(is_tagless)
            yield from self._source.skip_blanks()
            self._source.record()
            char = yield from self._source.next_char()
            if char == ",":
                self._source.take(1)
            elif self._layout.close and char == self._layout.close:
                self._source.take(1)
                break
            elif self._layout.close or not char.isidentifier():
                break
        self._source.recorded()

    def _expect(self, char: str) -> Waiting[None]:
        yield from self._source.skip_blanks()
        if (yield from self._source.next_char()) != char:
            raise Broken
        self._source.take(1)

    def _read_call(self, is_tagless: bool) -> Waiting[None]:
        name = yield from self._context.read_name()
        yield from self._expect("(")
        self._context.start_call(name, is_known=is_tagless)
        is_first = True
        while True:
            yield from self._source.skip_blanks()
            char = yield from self._source.next_char()
            if char == ")":
                break
            if char == ",":
                self._source.take(1)
                continue
            yield from self._read_argument(is_first)
            is_first = False
        self._source.take(1)
        if not is_first:
            self._context.out.arguments("}")
        self._context.out.end_call()

    def _read_argument(self, is_first: bool) -> Waiting[None]:
        self._source.record()
        key = yield from self._context.read_name()
        yield from self._expect("=")
        if not key:
            raise Broken
        self._source.recorded()
        self._context.out.arguments(("{" if is_first else ", ") + json_string(key) + ": ")
        yield from _Literal(self._context).read()


class _Literal:
    """One value. ``_open`` are the unclosed brackets."""

    def __init__(self, context: CallContext) -> None:
        self._source = context.source
        self._stops = context.stops
        self._write = context.out.arguments
        self._open: list[str] = []
        self._word = ""  # that may be a key
        self._between = ""  # a comma that may be the last one of a list

    def read(self) -> Waiting[None]:
        while True:
            yield from self._source.skip_blanks()
            char = yield from self._source.next_char()
            if not char or (yield from self._source.at(self._stops)):
                raise Broken
            if not self._open and char in (",", ")"):
                break
            yield from self._read_part(char)
        self._end_word()

    def _read_part(self, char: str) -> Waiting[None]:
        if char in "'\"":
            self._begin()
            yield from self._copy_string()
            return
        word = yield from self._read_word()
        if word:
            self._begin()
            self._word = word
            return
        self._source.take(1)
        if char in _CLOSES:
            self._begin()
            self._open.append(_CLOSES[char])
            self._write("[" if char == "(" else char)
        elif char in ")]}":
            self._end_word()
            self._between = ""
            self._write(self._open.pop() if self._open else char)
        elif char == ":":
            self._end_word(is_key=True)
            self._write(": ")
        elif char == ",":
            self._end_word()
            self._between = ", "
        else:
            raise Broken

    def _begin(self) -> None:
        self._end_word()
        self._write(self._between)
        self._between = ""

    def _read_word(self) -> Waiting[str]:
        pieces: list[str] = []
        while (yield from self._source.next_char()):
            text = self._source.take_match(_WORD)
            if not text:
                break
            pieces.append(text)
        return "".join(pieces)

    def _end_word(self, is_key: bool = False) -> None:
        word, self._word = self._word, ""
        if word:
            self._write(json_string(word) if is_key else json_of_word(word))

    def _copy_string(self) -> Waiting[None]:
        quote = self._source.take(1)
        plain = re.compile(rf"[^\\{quote}]+")
        self._write('"')
        while (char := (yield from self._source.next_char())) != quote:
            if char == "\\":
                text = yield from self._read_escape()
            elif char:
                text = self._source.take_match(plain)
            elif (yield from self._source.ready()):
                text = self._source.take_token().shown
            else:
                raise Broken
            self._write(json_string(text)[1:-1])
        self._source.take(1)
        self._write('"')

    def _read_escape(self) -> Waiting[str]:
        self._source.take(1)
        if not (yield from self._source.next_char()):
            raise Broken
        char = self._source.take(1)
        if char not in _HEX_LENGTHS:
            return _ESCAPES.get(char, char if char in "\\'\"" else "\\" + char)
        digits = ""
        while len(digits) < _HEX_LENGTHS[char] and (yield from self._source.next_char()) in _HEX:
            digits += self._source.take(1)
        code = int(digits, 16) if len(digits) == _HEX_LENGTHS[char] else 0x110000
        is_character = code < 0x110000 and code not in range(0xD800, 0xE000)
        return chr(code) if is_character else f"\\{char}{digits}"


def json_of_word(word: str) -> str:
    """A number or a constant; anything else as a string."""
    word = _WORDS.get(word, word)
    if word in _WORDS.values() or _NUMBER.fullmatch(word):
        return word
    with suppress(ValueError):  # also of an integer that is too long to be written
        return repr(int(word, 0))
    with suppress(ValueError):
        if isfinite(number := float(word)):
            return repr(number)
    return json_string(word)

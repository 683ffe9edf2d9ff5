"""Values of JSON, copied as they come, without being parsed."""

import json
import re
from collections.abc import Callable
from string import hexdigits

from services.gateway.text.source import Broken, Markers, TextSource, Waiting
from shared.text.surrogates import without_halves

Sink = Callable[[str], None]
_PLAIN = re.compile(r'[^"\\]+')  # in a string
_SCALAR = re.compile(r"[^\s,:{}\[\]\"<]+")
_HEX = frozenset(hexdigits)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_DEPTHS = {"{": 1, "[": 1, "}": -1, "]": -1}


class JsonText:
    """Reads JSON from ``source``. ``stops`` may occur in it only inside a string."""

    def __init__(self, source: TextSource, stops: Markers) -> None:
        self._source = source
        self._stops = stops
        firsts = "".join({text[0] for text in stops.texts})
        self._between = re.compile(f'[^"{{}}\\[\\]{re.escape(firsts)}]+')

    def copy(self, sink: Sink) -> Waiting[None]:
        """One value of any type."""
        char = yield from self._source.next_char()
        if char in ("{", "["):
            yield from self._copy_nested(sink)
        elif char == '"':
            yield from self._copy_string(sink)
        else:
            yield from self._copy_scalar(sink)

    def _copy_nested(self, sink: Sink) -> Waiting[None]:
        depth = 0
        while True:
            if (yield from self._source.at(self._stops)):
                raise Broken
            char = yield from self._source.next_char()
            if char == '"':
                yield from self._copy_string(sink)
            elif char in _DEPTHS:
                sink(self._source.take(1))
                depth += _DEPTHS[char]
                if not depth:
                    return
            elif char:
                sink(self._source.take_match(self._between) or self._source.take(1))
            else:
                yield from self._copy_token(sink)

    def _copy_token(self, sink: Sink) -> Waiting[None]:
        """A token that is no marker here is text like any other."""
        if not (yield from self._source.ready()):
            raise Broken
        sink(self._source.take_token().shown)

    def _copy_string(self, sink: Sink) -> Waiting[None]:
        sink(self._source.take(1))
        yield from self._copy_to_quote(sink)

    def _copy_to_quote(self, sink: Sink) -> Waiting[None]:
        while (char := (yield from self._source.next_char())) != '"':
            if char == "\\":
                sink(self._source.take(1))
                if (yield from self._source.next_char()):
                    sink(self._source.take(1))
            elif char:
                sink(self._source.take_match(_PLAIN))
            else:
                yield from self._copy_token(sink)
        sink(self._source.take(1))

    def _copy_scalar(self, sink: Sink) -> Waiting[None]:
        num_pieces = 0
        while True:
            if (yield from self._source.at(self._stops)):
                break
            yield from self._source.next_char()
            text = self._source.take_match(_SCALAR)
            if not text:
                break
            sink(text)
            num_pieces += 1
        if not num_pieces:
            raise Broken

    def read_string(self) -> Waiting[str]:
        """A string, decoded."""
        if (yield from self._source.next_char()) != '"':
            raise Broken
        pieces: list[str] = []
        yield from self._copy_string(pieces.append)
        try:
            return without_halves(json.loads("".join(pieces), strict=False))
        except ValueError:
            raise Broken from None

    def copy_arguments(self, sink: Sink) -> Waiting[None]:
        """An object; an object written as a string is decoded; null is empty."""
        char = yield from self._source.next_char()
        if char == '"':
            yield from self._copy_decoded(sink)
        elif char == "n":
            pieces: list[str] = []
            yield from self._copy_scalar(pieces.append)
            text = "".join(pieces)
            sink("" if text == "null" else text)
        else:
            yield from self.copy(sink)

    def _copy_decoded(self, sink: Sink) -> Waiting[None]:
        """The content of a string if it begins as JSON, otherwise the string itself."""
        self._source.take(1)
        blanks = yield from self._source.skip_blanks()
        if (yield from self._source.next_char()) not in ("{", "["):
            sink('"' + blanks)
            yield from self._copy_to_quote(sink)
            return
        while (char := (yield from self._source.next_char())) != '"':
            if char == "\\":
                sink((yield from self._read_escape()))
            elif char:
                sink(self._source.take_match(_PLAIN))
            else:
                yield from self._copy_token(sink)
        self._source.take(1)

    def _read_escape(self) -> Waiting[str]:
        self._source.take(1)
        if not (yield from self._source.next_char()):
            raise Broken
        char = self._source.take(1)
        if char != "u":
            return _ESCAPES.get(char, char)
        units = (yield from self._read_hex()).to_bytes(2, "big")
        if units[0] in range(0xD8, 0xDC) and (yield from self._source.next_char()) == "\\":
            self._source.take(1)
            if (yield from self._source.next_char()) == "u":
                self._source.take(1)
                units += (yield from self._read_hex()).to_bytes(2, "big")
        return units.decode("utf-16-be", "replace")

    def _read_hex(self) -> Waiting[int]:
        digits = ""
        while len(digits) < 4 and (yield from self._source.next_char()) in _HEX:
            digits += self._source.take(1)
        if len(digits) < 4:
            raise Broken
        return int(digits, 16)

"""Calls as objects with bare keys; they become JSON as they come."""

from services.gateway.text.context import CallContext
from services.gateway.text.pythonic_calls import json_of_word
from services.gateway.text.source import Broken, Waiting
from services.gateway.text.value_types import json_string
from shared.dialects.formats import BareLayout


class BareCalls:
    def __init__(self, context: CallContext, layout: BareLayout) -> None:
        self._context = context
        self._source = context.source
        self._write = context.out.arguments
        stops = sorted(context.stops.all)
        self._name_open = context.markers(layout.name_open)
        self._quote = context.markers(layout.quote)
        self._key_close = context.markers(":")
        self._key_end = context.markers(":", "{", "}", "[", "]", layout.quote, *stops)
        self._word_end = context.markers(",", "}", "]", layout.quote, *stops)
        self._open: list[str] = []  # closing brackets
        self._has_before = False  # an item before this one in its list or object

    def read(self) -> Waiting[None]:
        yield from self._source.try_take(self._name_open)
        name = yield from self._context.read_name()
        if (yield from self._source.next_char()) != "{":
            raise Broken
        self._context.start_call(name)
        yield from self._open_or_copy()
        while self._open:
            yield from self._read_item()
        self._context.out.end_call()

    def _read_item(self) -> Waiting[None]:
        """An item of the innermost list or object, or what ends it."""
        yield from self._source.skip_blanks()
        char = yield from self._source.next_char()
        if char == ",":
            self._source.take(1)
        elif char == self._open[-1]:
            self._write(self._source.take(1))
            self._open.pop()
            self._has_before = True
        else:
            key = (yield from self._read_key()) if self._open[-1] == "}" else ""
            self._write(", " * self._has_before + key)
            yield from self._source.skip_blanks()
            yield from self._open_or_copy()

    def _read_key(self) -> Waiting[str]:
        """A key, bare or between quotes, and the colon after it."""
        self._source.record()
        pieces: list[str] = []
        if (yield from self._source.try_take(self._quote)):
            yield from self._copy_to_quote(pieces)
        else:
            while text := (yield from self._source.until(self._key_end)):
                pieces.append(text)
        yield from self._source.skip_blanks()
        key = "".join(pieces).strip().strip('"')
        if not (yield from self._source.try_take(self._key_close)) or not key:
            raise Broken
        self._source.recorded()
        return json_string(key) + ": "

    def _open_or_copy(self) -> Waiting[None]:
        char = yield from self._source.next_char()
        if char in ("{", "["):
            self._write(self._source.take(1))
            self._open.append("}" if char == "{" else "]")
            self._has_before = False
            return
        if (yield from self._source.try_take(self._quote)):
            yield from self._copy_string()
        else:
            yield from self._copy_word()
        self._has_before = True

    def _copy_string(self) -> Waiting[None]:
        self._write('"')
        while text := (yield from self._source.until(self._quote)):
            self._write(json_string(text)[1:-1])
        if not (yield from self._source.try_take(self._quote)):
            raise Broken
        self._write('"')

    def _copy_to_quote(self, pieces: list[str]) -> Waiting[None]:
        while text := (yield from self._source.until(self._quote)):
            pieces.append(text)
        if not (yield from self._source.try_take(self._quote)):
            raise Broken

    def _copy_word(self) -> Waiting[None]:
        pieces: list[str] = []
        while text := (yield from self._source.until(self._word_end)):
            pieces.append(text)
        if not (word := "".join(pieces).strip()):
            raise Broken
        self._write(json_of_word(word))

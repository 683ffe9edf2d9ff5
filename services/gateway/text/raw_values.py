"""Arguments that a model writes as text between markers, made into JSON as they come."""

import re
from collections.abc import Mapping
from typing import Protocol

from services.gateway.text.context import CallContext
from services.gateway.text.json_text import Sink
from services.gateway.text.source import Broken, Markers, Waiting
from services.gateway.text.value_types import ANY, json_of, json_string, types_of_parameters

_NULLS = ("null", "None")
NO_STRING = frozenset({"null", "boolean", "integer", "number", "array", "object"})
_MAX_NULL_CHARS = 64  # with blanks
_IN_STRING = re.compile(r'(?:[^"\\\n]|\\.)*')
_TO_QUOTES = re.compile(r'\\.|"', re.DOTALL)


class RawArguments:
    """The object of the arguments of one call. ``padding`` is one character, or none, on both sides
    of a value and not a part of it."""

    def __init__(self, context: CallContext, name: str, padding: str = "") -> None:
        self._source = context.source
        self._out = context.out
        self._types: Mapping[str, frozenset[str]] = types_of_parameters(context.functions.get(name))
        self._padding = padding
        self._num_values = 0

    def read_value(self, key: str, close: Markers, is_string: bool | None = None) -> Waiting[None]:
        """The value of parameter ``key``, and ``close`` after it; ``is_string``: as the model says,
        which decides if the schema does not."""
        self.begin(key)
        types = self._types.get(key, ANY)
        if is_string is not None and (types == ANY or types > {"string"}):
            types = frozenset({"string"}) if is_string else NO_STRING
        value = new_value(self._out.arguments, self._padding, types)
        while True:
            text, marker = yield from self._source.read(close)
            if marker is not None and not (yield from self._is_quoted(value)):
                break
            if not text and marker is None:
                value.cut()
                raise Broken
            value.add(text or marker or "")
        value.end()

    def _is_quoted(self, value: "Value") -> Waiting[bool]:
        """True: the marker just read stands in a string of the value's JSON, which has no line
        ends."""
        if self._source.index is not None or not value.has_open_string:
            return False
        return (yield from self._source.is_before('"', _IN_STRING))

    def begin(self, key: str) -> None:
        """The key of the next value."""
        self._out.arguments(", " if self._num_values else "{")
        self._out.arguments(json_string(key) + ": ")
        self._num_values += 1

    def end(self) -> None:
        if self._num_values:
            self._out.arguments("}")
        self._out.end_call()


class Value(Protocol):
    @property
    def has_open_string(self) -> bool:
        """True: it is JSON that is cut in a string."""

    def add(self, text: str) -> None: ...

    def end(self) -> None: ...

    def cut(self) -> None:
        """The text ended inside the value."""


def new_value(sink: Sink, padding: str, types: frozenset[str]) -> Value:
    if types == {"string"}:
        return _String(sink, padding)
    if types == {"string", "null"}:
        return _StringOrNull(sink, padding)
    return _Typed(sink, padding, types)


class _String:
    """Written as it comes, except a last character that may be padding."""

    has_open_string = False

    def __init__(self, sink: Sink, padding: str) -> None:
        self._sink = sink
        self._padding = padding
        self._held = ""
        self._has_begun = False
        sink('"')

    def add(self, text: str) -> None:
        if not self._has_begun:
            self._has_begun = True
            text = text.removeprefix(self._padding)
        text = self._held + text
        shown = text.removesuffix(self._padding)
        self._held = text[len(shown) :]
        self._sink(json_string(shown)[1:-1])

    def end(self) -> None:
        self._sink('"')

    def cut(self) -> None:
        self._sink(json_string(self._held)[1:-1])


class _Typed:
    """Held until it has ended: its type is unknown before."""

    def __init__(self, sink: Sink, padding: str, types: frozenset[str]) -> None:
        self._sink = sink
        self._padding = padding
        self._types = types
        self._pieces: list[str] = []
        self._num_quotes = 0
        self._escape = ""  # a backslash at the end of the pieces

    @property
    def has_open_string(self) -> bool:
        may_be_string = self._types == ANY or "string" in self._types
        return not may_be_string and self._num_quotes % 2 == 1

    def add(self, text: str) -> None:
        self._pieces.append(text)
        parts = _TO_QUOTES.findall(self._escape + text)
        self._num_quotes += parts.count('"')
        self._escape = "\\" if _ends_escaped(self._escape + text) else ""

    def end(self) -> None:
        text = "".join(self._pieces).removeprefix(self._padding).removesuffix(self._padding)
        self._sink(json_of(text, self._types))

    def cut(self) -> None:
        self._sink("".join(self._pieces))


class _StringOrNull:
    """A string from the first character on that distinguishes it from null."""

    has_open_string = False

    def __init__(self, sink: Sink, padding: str) -> None:
        self._sink = sink
        self._padding = padding
        self._held: list[str] = []
        self._begun = ""  # without the blanks before it
        self._string: _String | None = None

    def add(self, text: str) -> None:
        if self._string is not None:
            self._string.add(text)
            return
        self._held.append(text)
        self._begun = (self._begun + text).lstrip()
        may_be_null = any(word.startswith(self._begun.rstrip()) for word in _NULLS)
        if not may_be_null or len(self._begun) > _MAX_NULL_CHARS:
            self._write_string()

    def _write_string(self) -> None:
        self._string = _String(self._sink, self._padding)
        self._string.add("".join(self._held))

    def end(self) -> None:
        if self._string is None and self._begun.rstrip() in _NULLS:
            self._sink("null")
            return
        if self._string is None:
            self._write_string()
        if self._string is not None:
            self._string.end()

    def cut(self) -> None:
        if self._string is None:
            self._write_string()
        if self._string is not None:
            self._string.cut()


def _ends_escaped(text: str) -> bool:
    """True: the last character is a backslash that escapes the next one."""
    return (len(text) - len(text.rstrip("\\"))) % 2 == 1

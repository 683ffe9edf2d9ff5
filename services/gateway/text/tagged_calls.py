"""Calls whose arguments are text between markers."""

from services.gateway.text.context import CallContext
from services.gateway.text.raw_values import RawArguments
from services.gateway.text.source import Broken, Waiting
from shared.dialects.formats import PairsLayout, TaggedLayout


class PairCalls:
    """Calls as a name, then keys and values in markers of their own."""

    def __init__(self, context: CallContext, layout: PairsLayout, call_close: str) -> None:
        self._context = context
        self._source = context.source
        self._key_open = context.markers(layout.key_open)
        self._first = context.markers(layout.key_open, call_close)
        self._name_close = context.markers(layout.name_close)
        self._key_close = context.markers(layout.key_close)
        self._key_end = context.markers(layout.key_close, *sorted(context.stops.all))
        self._value_open = context.markers(layout.value_open)
        self._value_close = context.markers(layout.value_close)

    def read(self) -> Waiting[None]:
        name = yield from self._context.read_name()
        if self._name_close.all:
            if not (yield from self._source.try_take(self._name_close)):
                raise Broken
            yield from self._source.skip_blanks()
        elif not (yield from self._source.at(self._first)):
            raise Broken
        self._context.start_call(name)
        arguments = RawArguments(self._context, name)
        while (yield from self._source.at(self._key_open)):
            key = yield from self._read_key()
            yield from arguments.read_value(key, self._value_close)
            yield from self._source.skip_blanks()
        if not (yield from self._source.ready()):
            raise Broken
        arguments.end()

    def _read_key(self) -> Waiting[str]:
        """The key before a value, including the markers on both sides of it."""
        self._source.record()
        yield from self._source.try_take(self._key_open)
        pieces: list[str] = []
        while text := (yield from self._source.until(self._key_end)):
            pieces.append(text)
        if not (yield from self._source.try_take(self._key_close)):
            raise Broken
        yield from self._source.skip_blanks()
        if not (yield from self._source.try_take(self._value_open)):
            raise Broken
        self._source.recorded()
        return "".join(pieces).strip()


class TaggedCalls:
    """Several functions may be between the markers of one call: each is a call."""

    def __init__(self, context: CallContext, layout: TaggedLayout) -> None:
        self._context = context
        self._source = context.source
        self._layout = layout
        self._function_open = context.markers(layout.function_open)
        self._name_close = context.markers(layout.name_close)
        self._name_end = context.markers(layout.name_close, "\n")
        self._parameter_close = context.markers(layout.parameter_close)
        self._next = context.markers(layout.parameter_open, layout.function_close)
        self._next_or_stop = context.markers(
            layout.parameter_open, layout.function_close, *sorted(context.stops.all)
        )

    def read(self, is_tagless: bool) -> Waiting[None]:
        """``is_tagless``: the text began with the function, so it is a call only if the request has
        a function of this name."""
        if not is_tagless and not (yield from self._source.try_take(self._function_open)):
            raise Broken
        while True:
            yield from self._read_call(is_tagless)
            yield from self._source.skip_blanks()
            self._source.record()
            if not (yield from self._source.try_take(self._function_open)):
                self._source.recorded()
                return

    def _read_call(self, is_tagless: bool) -> Waiting[None]:
        name, _ = yield from self._read_name(self._layout.index_open)
        self._context.start_call(name, is_known=is_tagless)
        arguments = RawArguments(self._context, name, self._layout.value_padding)
        while True:
            yield from self._source.skip_blanks()
            while text := (yield from self._source.until(self._next_or_stop)):
                self._context.out.content(text)
            self._source.record()
            marker = yield from self._source.try_take(self._next)
            if marker != self._layout.parameter_open:
                break
            key, word = yield from self._read_name(self._layout.type_open)
            self._source.recorded()
            is_string = word == self._layout.type_words.get("string") if word else None
            yield from arguments.read_value(key, self._parameter_close, is_string)
        self._source.recorded()
        if not (yield from self._source.ready()) and marker is None:
            raise Broken
        arguments.end()

    def _read_name(self, rest_open: str) -> Waiting[tuple[str, str]]:
        """A name and the word after ``rest_open``."""
        pieces: list[str] = []
        while text := (yield from self._source.until(self._name_end)):
            pieces.append(text)
        if not (yield from self._source.try_take(self._name_close)):
            raise Broken
        name, _, rest = (
            "".join(pieces).partition(rest_open) if rest_open else ("".join(pieces), "", "")
        )
        for char, escape in reversed([*self._layout.escapes.items()]):
            name = name.replace(escape, char)
        return name.strip(), rest.strip()

"""Calls as a name, then keys and values in markers of their own."""

from services.gateway.text.context import Context
from services.gateway.text.raw_values import RawArguments
from services.gateway.text.source import Broken, Waiting
from shared.dialects.formats import PairsLayout


class PairCalls:
    def __init__(self, context: Context, layout: PairsLayout, call_close: str) -> None:
        self._context = context
        self._source = context.source
        self._key_open = context.markers(layout.key_open)
        self._first = context.markers(layout.key_open, call_close)
        self._key_close = context.markers(layout.key_close)
        self._key_end = context.markers(layout.key_close, *sorted(context.stops.all))
        self._value_open = context.markers(layout.value_open)
        self._value_close = context.markers(layout.value_close)

    def read(self) -> Waiting[None]:
        name = yield from self._context.read_name()
        if not (yield from self._source.at(self._first)):
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
        """What stands before a value, the markers on both sides of it included."""
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

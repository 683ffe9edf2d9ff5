"""Calls with markers around the name of the function and of each parameter."""

from services.gateway.text.context import Context
from services.gateway.text.raw_values import RawArguments
from services.gateway.text.source import Broken, Waiting
from shared.dialects.formats import TaggedLayout


class TaggedCalls:
    """Also several functions between the markers of one call: each is a call."""

    def __init__(self, context: Context, layout: TaggedLayout) -> None:
        self._context = context
        self._source = context.source
        self._padding = layout.value_padding
        self._parameter_open = layout.parameter_open
        self._function_open = context.markers(layout.function_open)
        self._name_close = context.markers(layout.name_close)
        self._name_end = context.markers(layout.name_close, "\n")
        self._parameter_close = context.markers(layout.parameter_close)
        self._next = context.markers(layout.parameter_open, layout.function_close)
        self._next_or_stop = context.markers(
            layout.parameter_open, layout.function_close, *sorted(context.stops.all)
        )

    def read(self, is_tagless: bool) -> Waiting[None]:
        """``is_tagless``: the model began with the function, which is a call only if there is such
        a function."""
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
        name = yield from self._read_name()
        self._context.start_call(name, is_known=is_tagless)
        arguments = RawArguments(self._context, name, self._padding)
        while True:
            yield from self._source.skip_blanks()
            while text := (yield from self._source.until(self._next_or_stop)):
                self._context.out.content(text)
            self._source.record()
            marker = yield from self._source.try_take(self._next)
            if marker != self._parameter_open:
                break
            key = yield from self._read_name()
            self._source.recorded()
            yield from arguments.read_value(key, self._parameter_close)
        self._source.recorded()
        if not (yield from self._source.ready()) and marker is None:
            raise Broken
        arguments.end()

    def _read_name(self) -> Waiting[str]:
        pieces: list[str] = []
        while text := (yield from self._source.until(self._name_end)):
            pieces.append(text)
        if not (yield from self._source.try_take(self._name_close)):
            raise Broken
        return "".join(pieces).strip()

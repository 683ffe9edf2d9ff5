"""Calls as a name, a marker and the arguments in JSON."""

from services.gateway.text.context import Context
from services.gateway.text.source import Broken, Waiting
from shared.dialects.formats import MarkedNameLayout


class NamedCalls:
    def __init__(self, context: Context, layout: MarkedNameLayout) -> None:
        self._context = context
        self._source = context.source
        self._layout = layout
        self._kind_close = context.markers(layout.kind_close)
        self._id_open = context.markers(layout.id_open)
        self._arguments_open = context.markers(layout.arguments_open.strip())
        self._arguments_close = context.markers(layout.arguments_close.strip())

    def read(self) -> Waiting[None]:
        if self._layout.kind_close:
            yield from self._context.read_name()
            if not (yield from self._source.try_take(self._kind_close)):
                raise Broken
        written = yield from self._context.read_name()
        call_id = None
        if (yield from self._source.try_take(self._id_open)):
            call_id = yield from self._context.read_name()
        if not (yield from self._source.try_take(self._arguments_open)):
            raise Broken
        name, call_id = self._split(written, call_id)
        self._context.start_call(name, call_id=call_id)
        yield from self._read_arguments()

    def _split(self, written: str, call_id: str | None) -> tuple[str, str | None]:
        """The name and the id; a name with a number is the id, too."""
        if not self._layout.index_open:
            return written, call_id
        name = written.removeprefix(self._layout.name_open)
        before, _, index = name.rpartition(self._layout.index_open)
        return (before, written) if before and index.isdigit() else (name, call_id)

    def _read_arguments(self) -> Waiting[None]:
        yield from self._source.skip_blanks()
        if not (yield from self._source.at(self._context.stops)):
            yield from self._context.json.copy_arguments(self._context.out.arguments)
        if self._layout.arguments_close:
            yield from self._source.skip_blanks()
            yield from self._source.try_take(self._arguments_close)
        self._context.out.end_call()

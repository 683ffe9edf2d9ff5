"""Calls in the format of a model, with the markers around them."""

from collections.abc import Collection

from services.gateway.text.bare_calls import BareCalls
from services.gateway.text.context import CallContext
from services.gateway.text.element_calls import ElementCalls
from services.gateway.text.pythonic_calls import PythonicCalls
from services.gateway.text.source import Broken, Waiting
from services.gateway.text.tagged_calls import PairCalls, TaggedCalls
from shared.dialects.formats import (
    BareLayout,
    ElementsLayout,
    MarkedNameLayout,
    PairsLayout,
    PythonicLayout,
    TaggedLayout,
    ToolFormat,
)


class Calls:
    def __init__(self, context: CallContext, tools: ToolFormat) -> None:
        self._context = context
        self._source = context.source
        self._out = context.out
        self._tools = tools
        self._layout = tools.layout
        self._begins = "[" if isinstance(tools.layout, PythonicLayout) else "{"
        self._function_open = (
            tools.layout.function_open if isinstance(tools.layout, TaggedLayout) else ""
        )
        self._openers = {tools.section_open, tools.call_open, self._function_open} - {""}
        self._closers: set[str] = set()  # closers of the openers already read

    @property
    def markers(self) -> set[str]:
        """The markers that begin or end calls where content may come."""
        return self._openers | self._closers

    def read(self, marker: str) -> Waiting[None]:
        """Reads the part that begins with ``marker``, the last marker read."""
        if marker in self._openers:
            self._source.record(with_marker=True)
            yield from self._try_read(marker)
            yield from self.read_tagless()
        else:
            self._closers.discard(marker)

    def read_tagless(self) -> Waiting[None]:
        """Reads the next calls without an opening marker, up to the first part that is not a
        call."""
        has_read = self._tools.is_tagless
        while has_read:
            self._source.record()
            yield from self._source.skip_blanks()
            if self._out.num_calls and (yield from self._source.next_char()) == ";":
                self._source.take(1)
                yield from self._source.skip_blanks()
                if (yield from self._source.at(self._context.markers(*sorted(self._openers)))):
                    self._source.recorded()
                    return
            if (yield from self._source.next_char()) != self._begins:
                self._out.content(self._source.recorded())
                return
            has_read = yield from self._try_read("")

    def _try_read(self, marker: str) -> Waiting[bool]:
        if not (yield from self._context.try_call(self._read_call(marker))):
            return False
        is_section = marker in (self._tools.section_open, "")  # or a section without its opener
        section_close = self._tools.section_close if is_section else ""
        self._closers |= {self._tools.call_close, section_close} - {""}
        yield from self._read_closers()
        return True

    def _read_call(self, marker: str) -> Waiting[None]:
        yield from self._source.skip_blanks()
        if marker == self._tools.section_open and self._tools.call_open and marker:
            if not (yield from self._source.try_take(self._context.markers(self._tools.call_open))):
                raise Broken
            yield from self._source.skip_blanks()
        match self._layout:
            case TaggedLayout():
                yield from TaggedCalls(self._context, self._layout).read(
                    is_tagless=marker == self._function_open
                )
            case PairsLayout():
                call_close = self._tools.call_close
                yield from PairCalls(self._context, self._layout, call_close).read()
            case MarkedNameLayout():
                yield from NamedCalls(self._context, self._layout).read()
            case BareLayout():
                yield from BareCalls(self._context, self._layout).read()
            case ElementsLayout():
                yield from ElementCalls(self._context, self._layout).read()
            case PythonicLayout():
                yield from PythonicCalls(self._context, self._layout).read(not marker)
            case _:
                yield from read_json_calls(self._context, not marker)

    def _read_closers(self) -> Waiting[None]:
        """The closing markers that come next, with the blanks before them."""
        while self._closers:
            self._source.record()
            yield from self._source.skip_blanks()
            markers = self._context.markers(*sorted(self._closers))
            marker = yield from self._source.try_take(markers)
            blanks = self._source.recorded()
            if marker is None:
                self._out.content(blanks)
                return
            self._closers.discard(marker)


class NamedCalls:
    """Calls as a name, a marker and the arguments in JSON."""

    def __init__(self, context: CallContext, layout: MarkedNameLayout) -> None:
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


_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
_OTHER = ("type", "id", "index")  # keys that may precede the name in a call


def read_json_calls(
    context: CallContext, is_tagless: bool, arguments: Collection[str] = _ARGUMENTS
) -> Waiting[None]:
    """``is_tagless``: no marker came, so an object is a call only if it names an existing function;
    ``arguments`` are the keys of its arguments."""
    source = context.source
    if (yield from source.next_char()) != "[":
        yield from _JsonCall(context, is_tagless, arguments).read()
        return
    source.take(1)
    while True:
        yield from source.skip_blanks()
        yield from _JsonCall(context, is_tagless, arguments).read()
        yield from source.skip_blanks()
        char = yield from source.next_char()
        if char not in (",", "]"):
            raise Broken
        source.take(1)
        if char == "]":
            return
        source.record()


class _JsonCall:
    def __init__(self, context: CallContext, is_tagless: bool, arguments: Collection[str]) -> None:
        self._context = context
        self._source = context.source
        self._is_tagless = is_tagless
        self._arguments = arguments
        self._has_name = False
        self._has_arguments = False
        self._held: list[str] = []  # arguments that came before the name

    def read(self) -> Waiting[None]:
        yield from self._expect("{")
        yield from self._source.skip_blanks()
        while (yield from self._source.next_char()) != "}":
            yield from self._read_member()
            yield from self._source.skip_blanks()
            if (yield from self._source.next_char()) == ",":
                self._source.take(1)
                yield from self._source.skip_blanks()
        if not self._has_name:
            raise Broken
        self._source.take(1)
        self._context.out.end_call()

    def _expect(self, char: str) -> Waiting[None]:
        if (yield from self._source.next_char()) != char:
            raise Broken
        self._source.take(1)

    def _read_member(self) -> Waiting[None]:
        json = self._context.json
        key = yield from json.read_string()
        yield from self._source.skip_blanks()
        yield from self._expect(":")
        yield from self._source.skip_blanks()
        if key in _NAMES and not self._has_name:
            self._start((yield from json.read_string()))
        elif key in self._arguments and not self._has_arguments:
            self._has_arguments = True
            sink = self._context.out.arguments if self._has_name else self._held.append
            yield from json.copy_arguments(sink)
        elif self._is_tagless and not self._has_name and key not in _OTHER:
            raise Broken
        else:
            yield from json.copy(lambda _: None)

    def _start(self, name: str) -> None:
        self._context.start_call(name, is_known=self._is_tagless)
        self._has_name = True
        for text in self._held:
            self._context.out.arguments(text)

"""Calls in the format of a model, with the markers around them."""

from services.gateway.text.context import Context
from services.gateway.text.json_calls import read_json_calls
from services.gateway.text.named_calls import NamedCalls
from services.gateway.text.pair_calls import PairCalls
from services.gateway.text.pythonic_calls import PythonicCalls
from services.gateway.text.source import Broken, Waiting
from services.gateway.text.tagged_calls import TaggedCalls
from shared.dialects.formats import (
    MarkedNameLayout,
    PairsLayout,
    PythonicLayout,
    TaggedLayout,
    ToolFormat,
)


class Calls:
    def __init__(self, context: Context, tools: ToolFormat) -> None:
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
        self._closers: set[str] = set()  # of what has been opened

    @property
    def markers(self) -> set[str]:
        """What begins or ends calls where content may come."""
        return self._openers | self._closers

    def read(self, marker: str) -> Waiting[None]:
        """What begins with ``marker``, which was read last."""
        if marker in self._openers:
            self._source.record(with_marker=True)
            yield from self._try_read(marker)
            yield from self.read_tagless()
        else:
            self._closers.discard(marker)

    def read_tagless(self) -> Waiting[None]:
        """Calls that no marker begins, as many as come next."""
        has_read = self._tools.is_tagless
        while has_read:
            self._source.record()
            yield from self._source.skip_blanks()
            if self._out.num_calls and (yield from self._source.next_char()) == ";":
                self._source.take(1)
                yield from self._source.skip_blanks()
            if (yield from self._source.next_char()) != self._begins:
                self._out.content(self._source.recorded())
                return
            has_read = yield from self._try_read("")

    def _try_read(self, marker: str) -> Waiting[bool]:
        """What is no call is content as it came, from where it was recorded; but not where a call
        has begun and the text ends."""
        num_before = self._out.num_calls
        try:
            yield from self._read_call(marker)
        except Broken:
            has_begun = self._out.num_calls > num_before
            is_cut = has_begun and not (yield from self._source.ready())
            text = self._source.recorded()
            if has_begun and not is_cut:
                self._out.end_call()
            self._out.content("" if is_cut else text)
        if self._out.num_calls == num_before:
            return False
        section_close = self._tools.section_close if marker == self._tools.section_open else ""
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
            case PythonicLayout():
                yield from PythonicCalls(self._context, self._layout).read(not marker)
            case _:
                yield from read_json_calls(self._context, not marker)

    def _read_closers(self) -> Waiting[None]:
        """The closing markers that come at once, with the blanks before them."""
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

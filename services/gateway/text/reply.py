"""Splits a reply of reasoning, content and calls, each between markers of its own."""

from services.gateway.text.calls import Calls
from services.gateway.text.context import CallContext
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import Waiting
from shared.dialects.formats import ReasoningFormat, ToolFormat
from shared.wire.messages import OutputStart


class Reply:
    """A closing marker is removed if it matches the open part; otherwise it is content."""

    def __init__(
        self,
        context: CallContext,
        tools: ToolFormat | None,
        reasoning: ReasoningFormat | None,
        count: ReasoningCount,
    ) -> None:
        self._context = context
        self._source = context.source
        self._out = context.out
        self._reasoning = reasoning
        self._count = count
        self._calls = Calls(context, tools) if tools is not None else None
        self._closers: set[str] = set()  # of the answer
        self._ends = frozenset(reasoning.ends) if reasoning is not None else frozenset[str]()

    def read(self, start: OutputStart) -> Waiting[None]:
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning, start)
            yield from self._open_answer(self._reasoning)
        if self._calls is not None:
            yield from self._calls.read_tagless()
        while (yield from self._source.ready()):
            yield from self._read_content()

    def _read_reasoning(self, reasoning: ReasoningFormat, start: OutputStart) -> Waiting[None]:
        self._source.record()
        yield from self._source.skip_blanks()
        is_open = yield from self._source.try_take(self._context.markers(reasoning.open))
        blanks = self._source.recorded()
        if is_open:
            self._count.begin(self._source.index)
            yield from self._source.try_take(self._context.markers(reasoning.label))
        elif start == OutputStart.REASONING:
            self._count.begin(-1)
        else:
            self._out.content(blanks)
            return
        close = self._context.markers(reasoning.close)
        marker = None
        while marker is None:
            text, marker = yield from self._source.read(close)
            if not text and marker is None:
                return
            self._out.reasoning(text)
        self._count.end(self._source.index)
        self._out.end_reasoning()

    def _open_answer(self, reasoning: ReasoningFormat) -> Waiting[None]:
        self._source.record()
        yield from self._source.skip_blanks()
        if (yield from self._source.try_take(self._context.markers(reasoning.answer_open))):
            self._source.recorded()
            self._closers.add(reasoning.answer_close)
            yield from self._source.skip_blanks()
        self._out.content(self._source.recorded())

    def _read_content(self) -> Waiting[None]:
        """Content up to a marker, then the part that the marker begins."""
        of_calls = sorted(self._calls.markers) if self._calls is not None else ()
        markers = self._context.markers(*of_calls, *self._closers, *sorted(self._ends))
        while text := (yield from self._source.until(markers)):
            self._out.content(text)
        marker = yield from self._source.try_take(markers)
        if marker in self._closers or marker in self._ends:
            self._closers.discard(marker)
            self._out.drop_blanks()
            yield from self._source.skip_blanks()
        elif marker is not None and self._calls is not None:
            yield from self._calls.read(marker)

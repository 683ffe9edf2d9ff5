"""Replies as blocks of one kind each, as Inkling writes them."""

from services.gateway.text.calls import read_json_calls
from services.gateway.text.context import CallContext
from services.gateway.text.json_text import Sink
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import Waiting
from shared.dialects.formats import BlocksLayout
from shared.wire.messages import OutputStart


class BlocksReply:
    """``has_reasoning``, ``has_calls``: whether they are separated from content."""

    def __init__(
        self, context: CallContext, count: ReasoningCount, has_reasoning: bool, has_calls: bool
    ) -> None:
        self._context = context
        self._source = context.source
        self._out = context.out
        self._count = count
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        layout = self._layout = BlocksLayout()
        self._ends = context.markers(layout.end, layout.end_of_reply)
        self._start = context.markers(layout.start)
        self._kinds = context.markers(
            layout.reasoning, layout.text, layout.call, layout.end, layout.end_of_reply
        )
        self._between = context.markers(layout.start, layout.end, layout.end_of_reply)

    def read(self, start: OutputStart) -> Waiting[None]:
        """The prompt ends in the marker that starts a block, or inside a block."""
        if start == OutputStart.REASONING:
            self._count.begin(-1)
            yield from self._read_reasoning()
        elif start == OutputStart.ANSWER:
            yield from self._read_text(self._out.content)
        else:
            yield from self._source.try_take(self._start)
            yield from self._read_block()
        while (yield from self._source.ready()):
            while text := (yield from self._source.until(self._between)):
                self._out.content(text)
            if (yield from self._source.try_take(self._between)) == self._layout.start:
                yield from self._read_block()

    def _read_block(self) -> Waiting[None]:
        self._source.record()
        yield from self._context.read_name()
        kind = yield from self._source.try_take(self._kinds)
        skipped = self._source.recorded()
        if kind == self._layout.reasoning and self._has_reasoning:
            self._count.begin(self._source.index)
            yield from self._read_reasoning()
        elif kind == self._layout.call and self._has_calls:
            yield from self._read_call()
        else:
            self._out.content("" if kind else skipped)
            if kind not in self._ends.all:
                yield from self._read_text(self._out.content)

    def _read_reasoning(self) -> Waiting[None]:
        if (yield from self._read_text(self._out.reasoning)):
            self._count.end(self._source.index)
            self._out.end_reasoning()

    def _read_text(self, sink: Sink) -> Waiting[bool]:
        """The text of a block and its end; False: the output ended before."""
        while text := (yield from self._source.until(self._ends)):
            sink(text)
        return (yield from self._source.try_take(self._ends)) is not None

    def _read_call(self) -> Waiting[None]:
        """A call; an object that is none is content."""
        self._source.record(with_marker=True)
        yield from self._context.try_call(self._read_object())
        yield from self._read_text(self._out.content)

    def _read_object(self) -> Waiting[None]:
        yield from self._source.skip_blanks()
        yield from read_json_calls(self._context, False, (self._layout.arguments_key,))

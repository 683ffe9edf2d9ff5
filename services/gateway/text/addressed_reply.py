"""Replies as messages to recipients, as Muse Glimmer writes them."""

from services.gateway.text.calls import Calls
from services.gateway.text.context import CallContext
from services.gateway.text.messages_reply import MessagesReply
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import Waiting
from shared.dialects.formats import AddressedLayout, ToolFormat

ITSELF, USER = "self", "user"  # recipients that are no functions


class AddressedReply(MessagesReply):
    """Without ``tools`` or ``has_reasoning`` these parts are content."""

    def __init__(
        self,
        context: CallContext,
        count: ReasoningCount,
        tools: ToolFormat | None,
        *,
        has_reasoning: bool,
    ) -> None:
        layout = AddressedLayout()
        self._frame = layout.start, layout.message, layout.end, layout.end_of_reply
        super().__init__(context, count, self._frame, layout.message)
        self._calls = Calls(context, tools) if tools is not None else None
        markers = () if self._calls is None else sorted(self._calls.markers)
        self._in_call = context.markers(*self._frame, *markers)
        self._has_reasoning = has_reasoning

    def _read_body(self, header: str, recipient: str) -> Waiting[str | None]:
        if self._has_reasoning and recipient == ITSELF:
            self._count.begin(self._source.index)
            return (yield from self._read_reasoning())
        if self._calls is not None and recipient not in ("", ITSELF, USER):
            return (yield from self._read_calls(self._calls))
        return (yield from self._read_content())

    def _read_calls(self, calls: Calls) -> Waiting[str | None]:
        """The message of a function; calls quoted in another one are text."""
        while True:
            text, marker = yield from self._source.read(self._in_call)
            self._out.content(text)
            if marker in calls.markers:
                yield from calls.read(marker)
            elif marker is not None or not text:
                return marker

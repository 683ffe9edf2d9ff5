"""Replies as messages in channels, as gpt-oss writes them."""

import json

from services.gateway.text.context import CallContext
from services.gateway.text.messages_reply import MessagesReply
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import Waiting
from shared.dialects.formats import HarmonyLayout


class HarmonyReply(MessagesReply):
    """``has_reasoning``, ``has_calls``: whether they are separated from content."""

    def __init__(
        self,
        context: CallContext,
        count: ReasoningCount,
        *,
        has_reasoning: bool,
        has_calls: bool,
    ) -> None:
        layout = self._layout = HarmonyLayout()
        header = (layout.start, layout.channel, layout.constrain, layout.message)
        ends = (layout.end, layout.end_of_calls, layout.end_of_reply)
        super().__init__(context, count, (*header, *ends), layout.message)
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls

    def _read_body(self, header: str, recipient: str) -> Waiting[str | None]:
        if self._has_calls and recipient.startswith(self._layout.recipient_open):
            name = recipient.removeprefix(self._layout.recipient_open)
            return (yield from self._read_call(name))
        channel = header.partition(self._layout.channel)[2].split()
        if self._has_reasoning and channel[:1] == ["analysis"]:
            self._count.begin(self._source.index)
            return (yield from self._read_reasoning())
        return (yield from self._read_content())

    def _read_call(self, name: str) -> Waiting[str | None]:
        """A call ends in a marker, or with the text if its arguments are complete."""
        self._out.start_call(name)
        yield from self._source.skip_blanks()
        pieces: list[str] = []
        while True:
            text, marker = yield from self._source.read(self._markers)
            self._out.arguments(text)
            pieces.append(text)
            if marker is not None or (not text and _is_object("".join(pieces))):
                self._out.end_call()
            if marker is not None or not text:
                return marker


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False

"""Replies as messages in channels, as gpt-oss writes them."""

import json
import re

from services.gateway.text.collector import Collector
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import MarkerTable, TextSource, Waiting
from shared.dialects.formats import HarmonyLayout
from shared.wire.messages import OutputStart

_RECIPIENT = re.compile(r"to=(\S+)")


class HarmonyReply:
    """``has_reasoning``, ``has_calls``: whether they are separated from content."""

    def __init__(
        self,
        source: TextSource,
        out: Collector,
        count: ReasoningCount,
        table: MarkerTable,
        *,
        has_reasoning: bool,
        has_calls: bool,
    ) -> None:
        self._source = source
        self._out = out
        self._count = count
        self._has_reasoning = has_reasoning
        self._has_calls = has_calls
        layout = self._layout = HarmonyLayout()
        header = (layout.start, layout.channel, layout.constrain, layout.message)
        ends = (layout.end, layout.end_of_calls, layout.end_of_reply)
        self._markers = table.of(*header, *ends)
        self._recipient = table.of("to=")

    def read(self, start: OutputStart) -> Waiting[None]:
        if start == OutputStart.REASONING:
            self._count.begin(-1)
            marker = yield from self._read_reasoning()
        elif start == OutputStart.ANSWER or not (yield from self._begins_with_header()):
            marker = yield from self._read_content()
        else:
            marker = ""
        while marker is not None:
            marker = yield from self._read_message(marker)

    def _begins_with_header(self) -> Waiting[bool]:
        """The prompt ends inside a header, so the output may begin with a recipient or a marker."""
        self._source.record()
        yield from self._source.skip_blanks()
        if (yield from self._source.at(self._markers)) or (
            yield from self._source.at(self._recipient)
        ):
            self._source.recorded()
            return True
        self._out.content(self._source.recorded())
        return False

    def _read_message(self, marker: str) -> Waiting[str | None]:
        """A message after ``marker``; the marker that ends it."""
        header = [marker]
        while marker != self._layout.message:
            text, following = yield from self._source.read(self._markers)
            if not text and following is None:
                return None
            marker = following or ""
            header.append(f" {marker} " if marker else text)
        return (yield from self._read_body("".join(header)))

    def _read_body(self, header: str) -> Waiting[str | None]:
        recipient = _RECIPIENT.search(header)
        name = recipient.group(1) if recipient else ""
        if self._has_calls and name.startswith(self._layout.recipient_open):
            return (yield from self._read_call(name.removeprefix(self._layout.recipient_open)))
        channel = header.partition(self._layout.channel)[2].split()
        if self._has_reasoning and channel[:1] == ["analysis"]:
            self._count.begin(self._source.index)
            return (yield from self._read_reasoning())
        return (yield from self._read_content())

    def _read_reasoning(self) -> Waiting[str | None]:
        while True:
            text, marker = yield from self._source.read(self._markers)
            self._out.reasoning(text)
            if marker is not None:
                self._count.end(self._source.index)
                self._out.end_reasoning()
            if marker is not None or not text:
                return marker

    def _read_content(self) -> Waiting[str | None]:
        while True:
            text, marker = yield from self._source.read(self._markers)
            self._out.content(text)
            if marker is not None or not text:
                return marker

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

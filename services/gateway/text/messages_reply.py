"""Replies as messages with headers: harmony's, with channels, and Muse Glimmer's."""

import re
from abc import ABC, abstractmethod

from services.gateway.text.context import CallContext
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.source import Waiting
from shared.wire.messages import OutputStart

_RECIPIENT = re.compile(r"to=(\S+)")


class MessagesReply(ABC):
    """``markers`` are all of a frame; the one after a header is ``message``."""

    def __init__(
        self,
        context: CallContext,
        count: ReasoningCount,
        markers: tuple[str, ...],
        message: str,
    ) -> None:
        self._source = context.source
        self._out = context.out
        self._count = count
        self._markers = context.markers(*markers)
        self._message = message
        self._recipient = context.markers("to=")

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
        while marker != self._message:
            text, following = yield from self._source.read(self._markers)
            if not text and following is None:
                return None
            marker = following or ""
            header.append(f" {marker} " if marker else text)
        found = _RECIPIENT.search("".join(header))
        return (yield from self._read_body("".join(header), found.group(1) if found else ""))

    @abstractmethod
    def _read_body(self, header: str, recipient: str) -> Waiting[str | None]:
        """The body of a message; the marker that ends it."""

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

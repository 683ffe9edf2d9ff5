"""Messages of Anthropic's API as bytes: whole ones, and the events of streamed ones. Pure."""

from collections.abc import Iterable, Iterator
from typing import Any

from msgspec import UNSET, UnsetType

from services.gateway.apis.messages.replies.blocks import BlockList, BlockStream
from services.gateway.apis.messages.replies.errors import anthropic_error
from services.gateway.apis.messages.replies.objects import (
    CacheCreation,
    Message,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    Usage,
)
from services.gateway.apis.messages.requests.schema import CacheControl
from services.gateway.chat.replies.choice_parser import ChoiceParser
from services.gateway.chat.replies.reply import Reply, dropped_counts
from services.gateway.http.json_reply import encode
from services.gateway.mesh.output_collector import ChoiceUpdate
from shared.errors import RequestError
from shared.wire.messages import Finished

ID_PREFIX = "msg_"


def message_event(data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (data.__struct_config__.tag.encode(), encode(data))


class _Writer:
    """The common part of a whole message and a streamed one."""

    def __init__(self, reply: Reply, parser: ChoiceParser, shows_thinking: bool) -> None:
        self._reply = reply
        self._choice = parser
        self._stream = BlockStream(reply.head.system_fingerprint, shows_thinking)

    def is_over(self, update: ChoiceUpdate) -> bool:
        return self._choice.is_over

    def _message(
        self, content: list[Any], end: MessageEnd, finished: Finished | None = None
    ) -> Message:
        head = self._reply.head
        usage = self._usage(finished)
        return Message(
            id=head.id,
            model=head.model,
            content=content,
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=usage,
        )

    def _usage(self, finished: Finished | None) -> Usage:
        """The usage so far: the number of cached tokens is known at the end."""
        num_prompt = sum(map(len, self._reply.prompt_ids))
        dropped = dropped_counts(self._reply.dropped)
        if finished is None:
            return Usage(num_prompt, 0, 0, 0, UNSET, UNSET, *dropped)
        num_reasoning = self._choice.num_reasoning_tokens
        details = UNSET if num_reasoning is None else OutputTokensDetails(num_reasoning)
        num_cached = finished.num_cached
        num_created, created = self._created(num_prompt - num_cached)
        return Usage(
            num_prompt - num_cached - num_created,
            num_cached,
            finished.num_tokens,
            num_created,
            created,
            details,
            *dropped,
        )

    def _created(self, num_computed: int) -> tuple[int, CacheCreation | UnsetType]:
        retention_s = self._reply.job.options.retention_s
        if not retention_s:
            return 0, UNSET
        num = max(0, num_computed - 1)
        is_long = retention_s > CacheControl().retention_s
        return num, CacheCreation(0, num) if is_long else CacheCreation(num, 0)

    def _end(self, finished: Finished) -> MessageEnd:
        reason = self._choice.finish_reason(finished)
        if reason == "tool_calls":
            return MessageEnd("tool_use", None)
        if reason == "length":
            return MessageEnd(self._length_reason(finished), None)
        if isinstance(finished.stop_reason, str):
            return MessageEnd("stop_sequence", finished.stop_reason)
        return MessageEnd("end_turn", None)

    def _length_reason(self, finished: Finished) -> str:
        max_tokens = self._reply.job.params.max_tokens
        is_full = max_tokens is not None and finished.num_tokens < max_tokens
        return "model_context_window_exceeded" if is_full else "max_tokens"


class WholeMessage(_Writer):
    """A BodyWriter."""

    is_large = False

    def __init__(self, reply: Reply, parser: ChoiceParser, shows_thinking: bool) -> None:
        super().__init__(reply, parser, shows_thinking)
        self._blocks = BlockList()
        self._body = b""

    def add(self, update: ChoiceUpdate) -> None:
        events, update = self._choice.push(update)
        self._blocks.add(self._stream.push(events))
        if (finished := update.finished) is not None:
            self._blocks.add(self._stream.end())
            message = self._message(self._blocks.blocks(), self._end(finished), finished)
            self._body = encode(message)

    def write(self) -> Iterator[bytes]:
        yield self._body


class MessageEvents(_Writer):
    """A StreamWriter."""

    heartbeat = message_event(Ping())

    def open(self) -> bytes:
        message = self._message([], MessageEnd(None, None))
        return message_event(MessageStart(message)) + self.heartbeat

    def write(self, update: ChoiceUpdate) -> Iterator[bytes]:
        events, update = self._choice.push(update)
        yield from _encoded(self._stream.push(events))
        if (finished := update.finished) is not None:
            yield from _encoded(self._stream.end())
            yield message_event(MessageDelta(self._end(finished), self._usage(finished)))
            yield message_event(MessageStop())

    def close(self) -> bytes:
        return b""

    def fail(self, error: RequestError) -> bytes:
        request_id = self._reply.head.id.removeprefix(ID_PREFIX)
        return message_event(anthropic_error(error, request_id))


def _encoded(events: Iterable[Any]) -> Iterator[bytes]:
    return map(message_event, events)

"""OpenAI's replies as bytes: whole ones, and the server-sent events of streamed ones."""

from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from services.gateway.exchange import Progress
from services.gateway.openai import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    Choice,
    ChunkChoice,
    Completion,
    TextChoice,
    Usage,
)
from shared.messages import Finished

DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Head:
    """What all objects of one reply have in common; ``created`` in Unix seconds."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class Format(Protocol):
    """How one endpoint words its replies."""

    object: str
    chunk_object: str

    def opening(self) -> list[Choice]:
        """The choice of a chunk before the first text, or none."""

    def chunk(self, text: str, finish_reason: str | None) -> Choice: ...

    def whole(self, text: str, finish_reason: str) -> Choice: ...


class ChatFormat:
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self) -> list[Choice]:
        return [ChunkChoice(0, ChatDelta(role="assistant", content=""), None, None)]

    def chunk(self, text: str, finish_reason: str | None) -> Choice:
        return ChunkChoice(0, ChatDelta(content=text or None), None, finish_reason)

    def whole(self, text: str, finish_reason: str) -> Choice:
        return ChatChoice(0, ChatMessage("assistant", text), None, finish_reason)


class TextFormat:
    object = chunk_object = "text_completion"

    def opening(self) -> list[Choice]:
        return []

    def chunk(self, text: str, finish_reason: str | None) -> Choice:
        return TextChoice(0, text, None, finish_reason)

    def whole(self, text: str, finish_reason: str) -> Choice:
        return self.chunk(text, finish_reason)


class WholeWriter:
    """Progress to the body of a reply that is not streamed."""

    def __init__(self, reply_format: Format, head: Head) -> None:
        self._format = reply_format
        self._head = head
        self._texts: list[str] = []

    def write(self, progress: Progress) -> bytes:
        """The body, if ``progress`` is the end; until then nothing."""
        text, _, finished = progress
        self._texts.append(text)
        if finished is None:
            return b""
        choice = self._format.whole("".join(self._texts), finished.reason)
        return encode(_completion(self._head, self._format.object, [choice], _usage(finished)))


class EventWriter:
    """Progress to events, one stream long: opening, texts, finish reason, usage, [DONE]."""

    def __init__(self, reply_format: Format, head: Head, includes_usage: bool) -> None:
        self._format = reply_format
        self._head = head
        self._no_usage = None if includes_usage else UNSET
        self._unsent_opening = reply_format.opening()

    def write(self, progress: Progress) -> bytes:
        """All that ``progress`` gives to send; nothing while no whole character is there."""
        text, _, finished = progress
        if not text and finished is None:
            return b""
        opening, self._unsent_opening = self._unsent_opening, []
        choices = [*opening, self._format.chunk(text, finished.reason if finished else None)]
        events = b"".join(self._event([choice], self._no_usage) for choice in choices)
        return events + self._closing(finished) if finished else events

    def _closing(self, finished: Finished) -> bytes:
        if self._no_usage is UNSET:
            return DONE
        return self._event([], _usage(finished)) + DONE

    def _event(self, choices: list[Choice], usage: Usage | UnsetType | None) -> bytes:
        return event(_completion(self._head, self._format.chunk_object, choices, usage))


def event(data: Any) -> bytes:
    return b"data: %b\n\n" % encode(data)


def _completion(
    head: Head,
    kind: str,
    choices: list[Choice],
    usage: Usage | UnsetType | None,
) -> Completion:
    return Completion(
        head.id, kind, head.created, head.model, head.system_fingerprint, choices, usage
    )


def _usage(finished: Finished) -> Usage:
    num_prompt, num_tokens = finished.num_prompt_tokens, finished.num_tokens
    return Usage(num_prompt, num_tokens, num_prompt + num_tokens)

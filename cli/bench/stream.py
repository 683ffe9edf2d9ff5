"""The server-sent events of one answer, with the times of its tokens. Callers pass the times."""

from typing import Any

import msgspec

MAX_MESSAGE_CHARS = 200


class StreamError(Exception):
    """The answer is no valid stream, or it contains an error."""


class Delta(msgspec.Struct):
    """The delta of a chat. Servers send reasoning under either name."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    def has_tokens(self) -> bool:
        """A chunk of a completion stands for a token even without text; an empty chunk of a chat
        may hold only the role."""
        if self.delta is None:
            return bool(self.text) or self.finish_reason is None
        delta = self.delta
        return bool(delta.content or delta.reasoning or delta.reasoning_content or delta.tool_calls)


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int


class Event(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


DECODER = msgspec.json.Decoder(Event)


class Stream:
    """``first_s`` and ``last_s`` are the times of the first and the last chunk with tokens,
    ``gaps_s`` the times between consecutive ones."""

    def __init__(self) -> None:
        self.first_s: float | None = None
        self.last_s = 0.0
        self.gaps_s: list[float] = []
        self.usage: Usage | None = None
        self.is_done = False
        self._rest = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes bytes from the network. Raises StreamError."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_s)

    def end(self) -> Usage:
        """To be called at the end of the answer. Raises StreamError if it is incomplete."""
        if not self.is_done:
            raise StreamError("the stream ended without [DONE]")
        if self.usage is None:
            raise StreamError("the stream has no usage")
        return self.usage

    def _take(self, data: bytes, now_s: float) -> None:
        if data == b"[DONE]":
            self.is_done = True
            return
        try:
            event = DECODER.decode(data)
        except msgspec.MsgspecError as error:
            raise StreamError(f"not an event: {error}") from None
        if event.error is not None:
            raise StreamError(message_of(event.error))
        self.usage = event.usage or self.usage
        if any(choice.has_tokens() for choice in event.choices):
            self._note_tokens(now_s)

    def _note_tokens(self, now_s: float) -> None:
        if self.first_s is None:
            self.first_s = now_s
        else:
            self.gaps_s.append(now_s - self.last_s)
        self.last_s = now_s


def message_of(error: Any) -> str:
    """The text of OpenAI's error object, or of other errors."""
    text = error.get("message", error) if isinstance(error, dict) else error
    return printable(str(text)[:MAX_MESSAGE_CHARS])


def printable(text: str) -> str:
    """One line without control characters."""
    return "".join(each if each.isprintable() else " " for each in text)


def message_of_body(body: bytes) -> str:
    """The text of an error in an unstreamed answer."""
    try:
        value = msgspec.json.decode(body)
    except msgspec.MsgspecError:
        value = body.decode(errors="replace").strip()
    if isinstance(value, dict):
        value = value.get("error", value)
    return message_of(value)

"""Gathers the events of a choice: joins pieces of one kind, drops blanks between parts."""

from hashlib import sha256

from services.gateway.chat.replies.choice_parser import (
    Arguments,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from services.gateway.text.source import BLANKS
from shared.dialects.formats import IdForm

Kind = type[Reasoning] | type[Content] | type[Arguments]


class Over(Exception):
    """The first call has ended in a choice that may have only one."""


class Collector:
    """Drops blanks at the ends of the reasoning, and blanks between the content and the parts
    before and after it. ``ids`` and ``seed`` make the ids of calls."""

    def __init__(self, ids: IdForm, seed: str, is_parallel: bool) -> None:
        self._ids = ids
        self._seed = seed
        self._is_parallel = is_parallel
        self._events: list[Event] = []
        self._kind: Kind = Content
        self._pieces: list[str] = []
        self._blanks: list[str] = []  # that may have to be dropped
        self._has_content = False
        self._has_reasoned = False
        self._is_reasoning = False
        self._call_is_last = False
        self._has_arguments = False
        self.num_calls = 0
        self.has_open_call = False  # one that has not come to its end

    def take(self) -> list[Event]:
        """The events since the last time."""
        self._flush()
        events, self._events = self._events, []
        return events

    def _add(self, kind: Kind, text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._pieces.append(text)

    def _flush(self) -> None:
        text, self._pieces = "".join(self._pieces), []
        if not text:
            return
        if self._kind is Arguments:
            self._events.append(Arguments(self.num_calls - 1, text))
        elif self._kind is Reasoning:
            self._events.append(Reasoning(text))
        else:
            self._events.append(Content(text))

    def reasoning(self, text: str) -> None:
        if not self._has_reasoned:
            text = text.lstrip(BLANKS)
        if text:
            self._has_reasoned = self._is_reasoning = True
            self._add_stripped(Reasoning, text)

    def end_reasoning(self) -> None:
        self._blanks.clear()
        self._has_reasoned, self._is_reasoning = True, False

    def content(self, text: str) -> None:
        if text.strip(BLANKS):
            if not self._has_content and (self._has_reasoned or self.num_calls):
                self._blanks.clear()
                text = text.lstrip(BLANKS)
            self._has_content = True
            self._call_is_last = False
        self._add_stripped(Content, text)

    def _add_stripped(self, kind: Kind, text: str) -> None:
        """Holds the blanks at the end."""
        stripped = text.rstrip(BLANKS)
        if stripped:
            for each in (*self._blanks, stripped):
                self._add(kind, each)
            self._blanks.clear()
        if len(stripped) < len(text):
            self._blanks.append(text[len(stripped) :])

    def drop_blanks(self) -> None:
        self._blanks.clear()

    def start_call(self, name: str, call_id: str | None = None) -> None:
        if not self._is_parallel and self.num_calls:
            raise Over
        self._flush()
        self._events.append(CallStart(self.num_calls, call_id or self._new_id(name), name))
        self.num_calls += 1
        self._call_is_last = self.has_open_call = True
        self._has_arguments = False

    def _new_id(self, name: str) -> str:
        if self._ids == "kimi":
            return f"functions.{name}:{self.num_calls}"
        digest = sha256(f"{self._seed}/{self.num_calls}".encode()).hexdigest()
        return digest[:9] if self._ids == "mistral" else f"call_{digest[:24]}"

    def arguments(self, text: str) -> None:
        if text:
            self._has_arguments = True
            self._add(Arguments, text)

    def end_call(self) -> None:
        """The call is complete; without arguments it gets an empty object."""
        if not self._has_arguments:
            self.arguments("{}")
        self.has_open_call = False
        if not self._is_parallel:
            raise Over

    def finish(self) -> None:
        """The text has ended: blanks at its end belong to it, unless they end at another part."""
        if self._is_reasoning:
            self._add(Reasoning, "".join(self._blanks))
        elif not self._call_is_last and (self._has_content or not self._has_reasoned):
            self._add(Content, "".join(self._blanks))
        self._blanks.clear()

"""Reasoning, content and calls in OpenAI's shapes: deltas of a stream and a whole message."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from msgspec import UNSET, UnsetType

from services.gateway.chat.replies.openai import (
    Call,
    CallDelta,
    CalledFunction,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
)
from services.gateway.text.events import Arguments, CallStart, Content, Event, Reasoning
from shared.settings.gateway import ReasoningField


class ChatParts:
    """``field``: the fields that hold reasoning. ``is_legacy``: calls are OpenAI's older ones, of
    which a message has one."""

    def __init__(self, field: ReasoningField, is_legacy: bool) -> None:
        self._has_reasoning = field in ("both", "reasoning")
        self._has_reasoning_content = field in ("both", "reasoning_content")
        self._is_legacy = is_legacy

    def deltas(self, events: Iterable[Event]) -> Iterator[ChatDelta]:
        """Of one kind each; consecutive texts of a kind are one."""
        for event in merged_events(events):
            match event:
                case Reasoning(text):
                    yield ChatDelta(
                        reasoning=text if self._has_reasoning else None,
                        reasoning_content=text if self._has_reasoning_content else None,
                    )
                case Content(text):
                    yield ChatDelta(content=text)
                case CallStart():
                    yield self._call_start(event)
                case Arguments(index, text):
                    yield self._arguments(index, text)

    def message(self, events: Iterable[Event], shows_reasoning: bool) -> ChatMessage:
        """Of all events of a choice."""
        texts: dict[type[Event], list[str]] = {Reasoning: [], Content: []}
        calls: dict[int, CalledFunction] = {}
        ids: dict[int, str] = {}
        arguments: dict[int, list[str]] = {}
        for event in events:
            match event:
                case CallStart(index, call_id, name):
                    calls[index], ids[index] = CalledFunction(name, ""), call_id
                    arguments[index] = []
                case Arguments(index, text):
                    arguments[index].append(text)
                case _:
                    texts[type(event)].append(event.text)
        for index, function in calls.items():
            function.arguments = "".join(arguments[index])
        reasoning = ("".join(texts[Reasoning]) or None) if shows_reasoning else UNSET
        return ChatMessage(
            "assistant",
            "".join(texts[Content]) or None,
            tool_calls=self._calls(ids, calls),
            function_call=calls[0] if self._is_legacy and calls else UNSET,
            reasoning=reasoning if self._has_reasoning else UNSET,
            reasoning_content=reasoning if self._has_reasoning_content else UNSET,
        )

    def _calls(
        self, ids: dict[int, str], calls: dict[int, CalledFunction]
    ) -> list[Call] | UnsetType:
        if self._is_legacy or not calls:
            return UNSET
        return [Call(ids[index], function) for index, function in calls.items()]

    def _call_start(self, start: CallStart) -> ChatDelta:
        function = FunctionDelta("", start.name)
        if self._is_legacy:
            return ChatDelta(function_call=function)
        return ChatDelta(tool_calls=[CallDelta(start.index, function, start.id, "function")])

    def _arguments(self, index: int, text: str) -> ChatDelta:
        function = FunctionDelta(text)
        if self._is_legacy:
            return ChatDelta(function_call=function)
        return ChatDelta(tool_calls=[CallDelta(index, function)])


def merged_events(events: Iterable[Event]) -> list[Event]:
    """The same with consecutive texts of a kind as one."""
    merged: list[Event] = []
    for (kind, index), group in groupby(events, _kind):
        if kind is CallStart:
            merged += group
            continue
        text = "".join(event.text for event in group if not isinstance(event, CallStart))
        if kind is Reasoning:
            merged.append(Reasoning(text))
        else:
            merged.append(Content(text) if kind is Content else Arguments(index, text))
    return merged


def _kind(event: Event) -> tuple[type[Event], int]:
    return type(event), getattr(event, "index", -1)

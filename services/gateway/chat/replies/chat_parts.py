"""Reasoning, content and calls in OpenAI's shapes: deltas of a stream and a whole message."""

from collections.abc import Iterable, Sequence
from itertools import groupby

from msgspec import UNSET, UnsetType

from services.gateway.chat.replies.choice_parser import (
    Arguments,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from services.gateway.chat.replies.openai import (
    Call,
    CallDelta,
    CalledFunction,
    ChatDelta,
    ChatMessage,
    FunctionDelta,
)
from services.gateway.mesh.job import Parsing
from shared.settings.gateway import ReasoningField


class ChatParts:
    """``field`` names the fields of reasoning. Without ``parsing`` all events are content. A legacy
    one has OpenAI's older calls, one in a message."""

    def __init__(self, field: ReasoningField, parsing: Parsing | None) -> None:
        self._has_reasoning = field in ("both", "reasoning")
        self._has_reasoning_content = field in ("both", "reasoning_content")
        self._is_legacy = parsing is not None and parsing.is_legacy
        self._shows_reasoning = (
            parsing is not None and parsing.splits_reasoning and parsing.shows_reasoning
        )
        self._no_content = "" if parsing is None else None

    def deltas(self, events: Sequence[Event]) -> list[ChatDelta]:
        """Each delta is of one kind; consecutive texts of a kind are one."""
        return [self._delta(event) for event in merged_events(events)]

    def _delta(self, event: Event) -> ChatDelta:
        match event:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(
                    reasoning=text if self._has_reasoning else None,
                    reasoning_content=text if self._has_reasoning_content else None,
                )
            case CallStart():
                return self._call_start(event)
            case Arguments(index, text):
                return self._arguments(index, text)

    def message(self, events: Iterable[Event]) -> ChatMessage:
        """The message of all events of a choice."""
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
        reasoning = ("".join(texts[Reasoning]) or None) if self._shows_reasoning else UNSET
        return ChatMessage(
            "assistant",
            "".join(texts[Content]) or self._no_content,
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


def merged_events(events: Sequence[Event]) -> Sequence[Event]:
    """The same events with consecutive texts of a kind merged."""
    if len(events) < 2:
        return events
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

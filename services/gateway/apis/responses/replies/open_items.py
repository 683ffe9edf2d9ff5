"""Unfinished output items, each with its events of a stream. Pure."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from msgspec import UNSET, Raw, UnsetType

from services.gateway.apis.responses.replies.custom_input import CustomInput
from services.gateway.apis.responses.replies.objects import (
    NO_LIST,
    CustomCallItem,
    FunctionCallItem,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from services.gateway.chat.replies.choice_parser import CallStart

ItemEvent = tuple[str, dict[str, Any]]
"""The type of an event, and its fields except the ones that place it in the stream."""

ADDED, DONE = "response.output_item.added", "response.output_item.done"
PART_ADDED, PART_DONE = "response.content_part.added", "response.content_part.done"
SUMMARY = "response.reasoning_summary"


class OpenItem(Protocol):
    """``id`` is the item's; ``logprobs``, entries as JSON, belong to the text. The last event is
    the end of the whole item."""

    id: str

    def open(self) -> Iterator[ItemEvent]: ...

    def push(self, text: str, logprobs: Sequence[bytes] = ()) -> Iterator[ItemEvent]: ...

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]: ...


class OpenReasoning:
    """Its text is its content, or the only part of its summary if the client asked for one."""

    def __init__(
        self, item_id: str, is_summary: bool, encrypt: Callable[[str], str] | None
    ) -> None:
        self.id = item_id
        self._is_summary = is_summary
        self._encrypt = encrypt
        self._texts: list[str] = []
        if is_summary:
            self._place = {"summary_index": 0}
            self._part_added, self._part_done = f"{SUMMARY}_part.added", f"{SUMMARY}_part.done"
            self._kind = f"{SUMMARY}_text"
        else:
            self._place = {"content_index": 0}
            self._part_added, self._part_done = PART_ADDED, PART_DONE
            self._kind = "response.reasoning_text"

    def open(self) -> Iterator[ItemEvent]:
        yield ADDED, {"item": ReasoningItem(self.id, [], [], "in_progress")}
        yield self._part_added, self._place | {"part": self._part()}

    def push(self, text: str, logprobs: Sequence[bytes] = ()) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield f"{self._kind}.delta", self._place | {"delta": text}

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        part = self._part()
        yield f"{self._kind}.done", self._place | {"text": part.text}
        yield self._part_done, self._place | {"part": part}
        item = ReasoningItem(
            self.id,
            [part] if isinstance(part, SummaryText) else [],
            [part] if isinstance(part, ReasoningText) else [],
            status,
            self._encrypt(part.text) if self._encrypt is not None else UNSET,
        )
        yield DONE, {"item": item}

    def _part(self) -> SummaryText | ReasoningText:
        text = "".join(self._texts)
        return SummaryText(text) if self._is_summary else ReasoningText(text)


class OpenMessage:
    def __init__(self, item_id: str) -> None:
        self.id = item_id
        self._texts: list[str] = []
        self._logprobs: list[bytes] = []

    def open(self) -> Iterator[ItemEvent]:
        yield ADDED, {"item": MessageItem(self.id, "in_progress", [])}
        yield PART_ADDED, {"content_index": 0, "part": OutputText("")}

    def push(self, text: str, logprobs: Sequence[bytes] = ()) -> Iterator[ItemEvent]:
        self._texts.append(text)
        self._logprobs += logprobs
        delta = {"content_index": 0, "delta": text, "logprobs": _list(logprobs)}
        yield "response.output_text.delta", delta

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        part = self._part()
        done = {"content_index": 0, "text": part.text, "logprobs": part.logprobs}
        yield "response.output_text.done", done
        yield PART_DONE, {"content_index": 0, "part": part}
        yield DONE, {"item": MessageItem(self.id, status, [part])}

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=_list(self._logprobs))


class OpenFunctionCall:
    """``origin``: the namespace of the function, and its name there."""

    def __init__(self, item_id: str, start: CallStart, origin: tuple[str, str] | None) -> None:
        self.id = item_id
        self._call_id = start.id
        self._namespace: str | UnsetType = UNSET
        self._name = start.name
        if origin is not None:
            self._namespace, self._name = origin
        self._texts: list[str] = []

    def open(self) -> Iterator[ItemEvent]:
        yield ADDED, {"item": self._item("in_progress")}

    def push(self, text: str, logprobs: Sequence[bytes] = ()) -> Iterator[ItemEvent]:
        self._texts.append(text)
        yield "response.function_call_arguments.delta", {"delta": text}

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        item = self._item(status)
        done = {"name": item.name, "arguments": item.arguments}
        yield "response.function_call_arguments.done", done
        yield DONE, {"item": item}

    def _item(self, status: ItemStatus) -> FunctionCallItem:
        arguments = "".join(self._texts)
        return FunctionCallItem(
            id=self.id,
            call_id=self._call_id,
            name=self._name,
            arguments=arguments,
            status=status,
            namespace=self._namespace,
        )


class OpenCustomCall:
    def __init__(self, item_id: str, start: CallStart) -> None:
        self.id = item_id
        self._start = start
        self._input = CustomInput()
        self._texts: list[str] = []

    def open(self) -> Iterator[ItemEvent]:
        yield ADDED, {"item": self._item("in_progress")}

    def push(self, text: str, logprobs: Sequence[bytes] = ()) -> Iterator[ItemEvent]:
        yield from self._write(self._input.push(text))

    def close(self, status: ItemStatus) -> Iterator[ItemEvent]:
        yield from self._write(self._input.finish())
        item = self._item(status)
        yield "response.custom_tool_call_input.done", {"input": item.input}
        yield DONE, {"item": item}

    def _item(self, status: ItemStatus) -> CustomCallItem:
        text = "".join(self._texts)
        return CustomCallItem(self.id, self._start.id, self._start.name, text, status)

    def _write(self, text: str) -> Iterator[ItemEvent]:
        if text:
            self._texts.append(text)
            yield "response.custom_tool_call_input.delta", {"delta": text}


def _list(logprobs: Sequence[bytes]) -> Raw:
    return Raw(b"[%b]" % b",".join(logprobs)) if logprobs else NO_LIST

"""Reasoning, content and calls as blocks of a message of Anthropic's. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from io import StringIO

import msgspec
from msgspec import Raw

from services.gateway.apis.messages.replies.objects import (
    Block,
    BlockDelta,
    BlockDeltaEvent,
    BlockEvent,
    BlockStart,
    BlockStop,
    InputJsonDelta,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from services.gateway.apis.messages.requests.signature import Signer
from services.gateway.chat.replies.chat_parts import merged_events
from services.gateway.chat.replies.choice_parser import (
    Arguments,
    CallStart,
    Content,
    Event,
    Reasoning,
)

NO_INPUT = Raw(b"{}")


class BlockStream:
    """The events of a message's blocks, one block after the other. Thinking blocks are signed for
    the model ``fingerprint``; unless it ``shows_thinking`` they have no text."""

    def __init__(self, fingerprint: str, shows_thinking: bool) -> None:
        self._fingerprint = fingerprint
        self._shows_thinking = shows_thinking
        self._index = -1
        self._open: type[Event] | None = None
        self._signer = Signer(fingerprint)

    def push(self, events: Sequence[Event]) -> Iterator[BlockEvent]:
        for event in merged_events(events):
            match event:
                case CallStart(_, call_id, name):
                    yield from self._start(CallStart, ToolUseBlock(call_id, name, NO_INPUT))
                case Arguments(_, text):
                    yield self._delta(InputJsonDelta(text))
                case Content(text):
                    if self._open is not Content:
                        yield from self._start(Content, TextBlock(""))
                    yield self._delta(TextDelta(text))
                case Reasoning(text):
                    yield from self._think(text)

    def end(self) -> Iterator[BlockEvent]:
        """Ends the open block, if any."""
        if self._open is Reasoning:
            yield self._delta(SignatureDelta(self._signer.signature()))
        if self._open is not None:
            yield BlockStop(self._index)
        self._open = None

    def _think(self, text: str) -> Iterator[BlockEvent]:
        if self._open is not Reasoning:
            self._signer = Signer(self._fingerprint, holds_text=not self._shows_thinking)
            yield from self._start(Reasoning, ThinkingBlock("", ""))
        self._signer.add(text)
        if self._shows_thinking:
            yield self._delta(ThinkingDelta(text))

    def _start(self, kind: type[Event], block: Block) -> Iterator[BlockEvent]:
        yield from self.end()
        self._index += 1
        self._open = kind
        yield BlockStart(self._index, block)

    def _delta(self, delta: BlockDelta) -> BlockEvent:
        return BlockDeltaEvent(self._index, delta)


class BlockList:
    """Joins the events of blocks, as clients do."""

    def __init__(self) -> None:
        self._blocks: list[tuple[Block, StringIO]] = []

    def add(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlockStart(_, block):
                    self._blocks.append((block, StringIO()))
                case BlockDeltaEvent(_, delta):
                    self._add_delta(*self._blocks[-1], delta)

    def blocks(self) -> list[Block]:
        """Once each has ended."""
        return [_whole(block, text.getvalue()) for block, text in self._blocks]

    def _add_delta(self, block: Block, text: StringIO, delta: BlockDelta) -> None:
        match delta:
            case TextDelta(piece) | ThinkingDelta(piece) | InputJsonDelta(piece):
                text.write(piece)
            case SignatureDelta(signature) if isinstance(block, ThinkingBlock):
                block.signature = signature


def _whole(block: Block, text: str) -> Block:
    match block:
        case TextBlock():
            return TextBlock(text)
        case ThinkingBlock(_, signature):
            return ThinkingBlock(text, signature)
        case ToolUseBlock(call_id, name):
            return ToolUseBlock(call_id, name, _input(text))


def _input(arguments: str) -> Raw:
    """Always a JSON object: incomplete arguments become an empty one."""
    try:
        return Raw(msgspec.json.encode(msgspec.json.decode(arguments, type=dict[str, Raw])))
    except (msgspec.DecodeError, RecursionError):
        return NO_INPUT

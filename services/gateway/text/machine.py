"""Splits the text of a choice into reasoning, content and calls of tools as it comes. Pure.

    rules = OutputRules(                       # one for a request
        tools=KNOWN.find_tools(...), reasoning=KNOWN.find_reasoning(...),
        added_tokens={...},                    # texts of the vocabulary's added tokens
        functions={"name": schema of its parameters}, is_parallel=True,
    )
    machine = OutputMachine(rules, accepted.start, seed=f"{request}/{choice}")
    events = machine.push(text, marks)         # with each Delta
    events = machine.finish()                  # once, at the end

The events of a whole reply are the stream's events, one after the other: the same text and marks
make the same events, joined, wherever they are cut. ``seed`` gives calls their ids, unless the
model writes them, so that a replay keeps them.
"""

from collections import deque
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.gateway.chat.replies.choice_parser import Event
from services.gateway.text.blocks_reply import BlocksReply
from services.gateway.text.collector import Collector, Over
from services.gateway.text.context import CallContext
from services.gateway.text.json_text import JsonText
from services.gateway.text.messages_reply import AddressedReply, HarmonyReply
from services.gateway.text.reasoning_count import ReasoningCount
from services.gateway.text.reply import Reply
from services.gateway.text.source import Markers, MarkerTable, TextSource, Token, Waiting
from shared.dialects.formats import (
    AddressedLayout,
    Channels,
    HarmonyLayout,
    ReasoningFormat,
    ToolFormat,
)
from shared.wire.messages import OutputStart


class TokenMark(msgspec.Struct, frozen=True, gc=False):
    """A ``messages.Mark`` with the text of its token."""

    position: int
    num_chars: int
    index: int
    text: str


@dataclass(frozen=True)
class OutputRules:
    """The parts to look for in the output of a request.

    Without ``tools`` calls are content; without ``reasoning`` reasoning is content too. A marker
    among ``added_tokens`` is found only by its Mark, any other marker in the text. ``added_tokens``
    may contain every text of the vocabulary: only markers in brackets are looked up. ``functions``
    maps the names of tools to the JSON schemas of their parameters. Unless ``is_parallel``,
    everything after the first call is dropped.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    added_tokens: Container[str] = frozenset()
    functions: Mapping[str, Any] = field(default_factory=dict)
    is_parallel: bool = True
    table: MarkerTable = field(init=False)

    def __post_init__(self) -> None:
        tokens = {token: None for each in self.formats for token in each.tokens}
        object.__setattr__(self, "table", MarkerTable(self.added_tokens, tokens))

    @property
    def formats(self) -> list[ToolFormat | ReasoningFormat]:
        return [each for each in (self.tools, self.reasoning) if each is not None]

    @property
    def stops(self) -> frozenset[str]:
        """Markers that occur in a call only inside a string."""
        if self.tools is None:
            return frozenset()
        is_framed = isinstance(self.tools.layout, Channels)
        return self.tools.markers if is_framed else self.tools.outer_markers

    @property
    def markers(self) -> Markers:
        """All markers to look for."""
        return self.table.of(
            *sorted(frozenset[str]().union(*(each.markers for each in self.formats)))
        )


class OutputMachine:
    """``num_calls`` have begun. ``is_over``: later output is not needed, so the choice may be
    cancelled."""

    def __init__(self, rules: OutputRules, start: OutputStart, seed: str) -> None:
        self.is_over = False
        self._source = TextSource()
        ids = rules.tools.ids if rules.tools is not None else "call"
        self._out = Collector(ids, seed, rules.is_parallel)
        self._count = ReasoningCount()
        self._marks: deque[TokenMark] = deque()
        self._held = ""  # the text of a token that has not come as a whole
        self._position = 0  # position of the held text, or of the next text
        self._tokens = rules.markers.tokens
        self._parts = rules.table.parts.chars
        self._parser = self._parse(rules, start)

    @property
    def num_calls(self) -> int:
        return self._out.num_calls

    @property
    def num_chars(self) -> int:
        """The number of characters read; if it ``is_over``, all that are needed."""
        return self._source.num_chars

    @property
    def has_open_call(self) -> bool:
        """Whether the last call is unfinished."""
        return self._out.has_open_call

    def push(self, text: str, marks: Sequence[TokenMark] = ()) -> list[Event]:
        """The next part of the choice's text, and its marks, in order."""
        if self.is_over:
            return []
        self._marks.extend(
            mark for mark in marks if mark.text in self._tokens or mark.text in self._parts
        )
        self._put(self._held + text)
        next(self._parser, None)
        return self._out.take()

    def finish(self) -> list[Event]:
        """The events of the held text."""
        if not self.is_over:
            self._source.put(self._held)
            self._source.end()
            next(self._parser, None)
            self._out.finish()
        return self._out.take()

    def num_reasoning_tokens(self, num_tokens: int) -> int | None:
        """The number of reasoning tokens among the choice's ``num_tokens``, without markers; None:
        unknown, because a marker was text."""
        return self._count.total(num_tokens)

    def _put(self, text: str) -> None:
        """Gives ``text`` to the parser, tokens as tokens; an incomplete token is held."""
        begin = 0
        end = len(text)
        while self._marks and self._marks[0].position - self._position <= len(text):
            mark = self._marks[0]
            at = max(begin, mark.position - self._position)
            if at + mark.num_chars > len(text):
                end = at
                break
            self._source.put(text[begin:at])
            begin = at + mark.num_chars
            if char := self._parts.get(mark.text):
                self._source.put_part(char, text[at:begin])
            else:
                self._source.put(Token(mark.text, text[at:begin], mark.index))
            self._marks.popleft()
        self._source.put(text[begin:end])
        self._held = text[end:]
        self._position += end

    def _parse(self, rules: OutputRules, start: OutputStart) -> Waiting[None]:
        with suppress(Over):
            yield from self._reply(rules, start)
            return
        self.is_over = True

    def _reply(self, rules: OutputRules, start: OutputStart) -> Waiting[None]:
        tools, reasoning = rules.tools, rules.reasoning
        channels = next((each.channels for each in rules.formats if each.channels), None)
        stops = rules.table.of(*sorted(rules.stops))
        json = JsonText(self._source, stops)
        context = CallContext(
            source=self._source,
            out=self._out,
            functions=rules.functions,
            json=json,
            stops=stops,
            table=rules.table,
            doubles_names=isinstance(channels, AddressedLayout),
        )
        has_reasoning, has_calls = reasoning is not None, tools is not None
        if isinstance(channels, HarmonyLayout):
            harmony = HarmonyReply(
                context, self._count, has_reasoning=has_reasoning, has_calls=has_calls
            )
            return harmony.read(start)
        if isinstance(channels, AddressedLayout):
            reply = AddressedReply(context, self._count, tools, has_reasoning=has_reasoning)
            return reply.read(start)
        if channels is not None:
            return BlocksReply(context, self._count, has_reasoning, has_calls).read(start)
        return Reply(context, tools, reasoning, self._count).read(start)

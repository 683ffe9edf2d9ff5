"""From the text of a chat to reasoning, content and calls, for one reply."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from services.gateway.mesh.job import Parsing
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from services.gateway.text.events import Content, Event, Reasoning, TokenMark
from services.gateway.text.machine import OutputMachine, OutputRules
from shared.dialects.formats import ReasoningFormat
from shared.dialects.reasoning import REASONING_FORMATS
from shared.dialects.tools import find_tool_format
from shared.settings.gateway import ReasoningField
from shared.wire.messages import Finished, OutputStart


@dataclass(frozen=True)
class OutputParser:
    """``starts`` of the prompts; ``seed`` makes the ids of calls unique to this reply.
    ``reasoning_field`` is the setting."""

    parsing: Parsing
    rules: OutputRules
    table: TokenTable
    starts: Sequence[OutputStart]
    seed: str
    reasoning_field: ReasoningField

    @property
    def separates_reasoning(self) -> bool:
        """Whether the reply tells reasoning from content."""
        return bool(self.parsing.reasoning_parser) and self.parsing.separates_reasoning

    @property
    def call_end(self) -> str:
        """The finish reason of a text that ends in calls."""
        if self.parsing.is_named:
            return "stop"
        return "function_call" if self.parsing.is_legacy else "tool_calls"


def output_parser(
    parsing: Parsing,
    table: TokenTable,
    starts: Sequence[OutputStart],
    seed: str,
    reasoning_field: ReasoningField,
) -> OutputParser:
    rules = OutputRules(
        tools=find_tool_format(parsing.tool_parser, table) if parsing.tool_parser else None,
        reasoning=REASONING_FORMATS.get(parsing.reasoning_parser),
        added_tokens=table,
        functions=_functions(parsing.tools),
        is_parallel=parsing.is_parallel,
    )
    return OutputParser(
        parsing=parsing,
        rules=rules,
        table=table,
        starts=starts,
        seed=seed,
        reasoning_field=reasoning_field,
    )


class ChoiceParser:
    """The events of one choice, as its updates come; ``is_over``: the rest is of no interest, and
    there may be much of it."""

    def __init__(self, parser: OutputParser, prompt: int, index: int, includes_stop: bool) -> None:
        self._machine = OutputMachine(parser.rules, parser.starts[prompt], f"{parser.seed}/{index}")
        self._text = parser.table.text
        self._shows_reasoning = parser.parsing.shows_reasoning
        self._joiner = None
        if (reasoning := parser.rules.reasoning) and not parser.parsing.separates_reasoning:
            self._joiner = _Joiner(reasoning, parser.starts[prompt])
        self._call_end = parser.call_end
        self._is_held = parser.parsing.is_held
        parsing = parser.parsing
        may_be_cut = parser.rules.tools and not parsing.is_parallel and not parsing.is_held
        self._tokens = TextTokens(parser.table) if may_be_cut else None
        self._num_tokens = 0  # that came
        self._num_kept: int | None = None  # of a choice that is over
        self._includes_stop = includes_stop
        self.num_reasoning_tokens: int | None = None  # once it has ended, if it can be told

    @property
    def is_over(self) -> bool:
        return self._machine.is_over and not self._is_held

    @property
    def has_open_call(self) -> bool:
        """Whether the last call has not come to its end."""
        return self._machine.has_open_call

    def push(self, update: ChoiceUpdate) -> tuple[list[Event], ChoiceUpdate]:
        """Also returns ``update`` as the reply counts it: a choice that is over has the tokens up
        to there, whatever else has come."""
        marks = [
            TokenMark(mark.position, mark.num_chars, mark.index, self._text(mark.token_id))
            for mark in update.marks
        ]
        if self._tokens is not None and not self.is_over:
            self._tokens.add(update)
        events = self._machine.push(update.text, marks)
        if update.finished is not None:
            events += self._machine.finish()
        update = self._cut(update)
        if update.finished is not None:
            num_tokens = self._num_with_text(update.finished)
            self.num_reasoning_tokens = self._machine.num_reasoning_tokens(num_tokens)
        if self._joiner is not None:
            return self._joiner.join(events), update
        if self._shows_reasoning:
            return events, update
        return [event for event in events if not isinstance(event, Reasoning)], update

    def _cut(self, update: ChoiceUpdate) -> ChoiceUpdate:
        num_before = self._num_tokens
        self._num_tokens += update.num_tokens
        if self._tokens is None or not self.is_over:
            return update
        if self._num_kept is None:
            self._num_kept = self._tokens.num_before(self._machine.num_chars)
        update = update.cut(max(0, self._num_kept - num_before))
        if update.finished is None:
            return update
        finished = msgspec.structs.replace(
            update.finished, reason="stop", stop_reason=None, num_tokens=self._num_kept
        )
        return replace(update, finished=finished)

    def _num_with_text(self, finished: Finished) -> int:
        """A token that ends the text has none of its own, unless the client asked for that."""
        is_ended = finished.reason == "stop" and not isinstance(finished.stop_reason, str)
        return finished.num_tokens - (is_ended and not self._includes_stop)

    def finish_reason(self, update: ChoiceUpdate) -> str | None:
        """A text that was cut, by its length or by a stop string within a call, ends in no call."""
        if update.finished is None:
            return None
        has_calls = self._machine.num_calls and not self._machine.has_open_call
        ends_in_call = update.finished.reason == "stop" and has_calls
        return self._call_end if ends_in_call else update.finished.reason


class _Joiner:
    """Makes reasoning a part of the content, with the markers that the model wrote."""

    def __init__(self, reasoning: ReasoningFormat, start: OutputStart) -> None:
        self._open = "" if start == OutputStart.REASONING else reasoning.open
        self._close = reasoning.close
        self._is_reasoning = False

    def join(self, events: list[Event]) -> list[Event]:
        joined: list[Event] = []
        for event in events:
            if isinstance(event, Reasoning):
                opening = "" if self._is_reasoning else self._open
                joined.append(Content(opening + event.text))
            else:
                joined += [Content(self._close)] * self._is_reasoning
                joined.append(event)
            self._is_reasoning = isinstance(event, Reasoning)
        return joined


def _functions(tools: str) -> dict[str, Any]:
    """The schemas of the parameters by name."""
    functions = [tool["function"] for tool in msgspec.json.decode(tools)] if tools else []
    return {each["name"]: each.get("parameters") or {} for each in functions}


class TextTokens:
    """Counts by the bytes of the tokens, and not by what came together: how many come at once is
    a matter of drafts and of the load."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._ids: list[int] = []
        self._hidden: set[int] = set()  # indices of tokens that have no text
        self._texts: list[str] = []

    def add(self, update: ChoiceUpdate) -> None:
        self._ids += update.arrays.ids.tolist()
        self._hidden.update(mark.index for mark in update.marks if not mark.num_chars)
        self._texts.append(update.text)

    def num_before(self, num_chars: int) -> int:
        """How many tokens have written the first ``num_chars`` of the text, the last one maybe more
        than that."""
        text = "".join(self._texts)
        num_bytes = len(text[:num_chars].encode())
        is_first = True
        for index, token_id in enumerate(self._ids):
            if num_bytes <= 0:
                return index
            if index not in self._hidden:
                written = self._table.written(token_id)
                num_bytes -= len(written)
                if is_first and written.startswith(b" ") and not text.startswith(" "):
                    num_bytes += 1  # some decoders strip the blank that a text begins with
                is_first = False
        return len(self._ids)

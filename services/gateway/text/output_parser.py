"""Splits the text of a chat into reasoning, content and calls."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from services.gateway.chat.replies.choice_parser import Content, Event, Reasoning
from services.gateway.mesh.job import Job, Parsing
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from services.gateway.text.machine import OutputMachine, OutputRules, TokenMark
from shared.dialects.formats import ReasoningFormat
from shared.dialects.known import KNOWN
from shared.wire.messages import Finished, OutputStart


def output_parsers(
    job: Job, parsing: Parsing, table: TokenTable, starts: Sequence[OutputStart], seed: str
) -> list["OutputParser"]:
    """One parser for each choice; ``starts`` are the output starts of the prompts, and ``seed``
    makes the ids of calls unique to this reply."""
    rules = OutputRules(
        tools=KNOWN.find_tools(parsing.tool_parser, table) if parsing.tool_parser else None,
        reasoning=KNOWN.find_reasoning(parsing.reasoning_parser, table),
        added_tokens=table,
        functions=_functions(parsing.tools),
        is_parallel=parsing.is_parallel,
    )
    return [
        OutputParser(
            job=job,
            parsing=parsing,
            rules=rules,
            table=table,
            start=starts[index // job.num_choices],
            seed=f"{seed}/{index}",
        )
        for index in range(job.total_choices)
    ]


class OutputParser:
    """A ChoiceParser of reasoning, content and calls, after the first text of the job."""

    def __init__(
        self,
        job: Job,
        parsing: Parsing,
        rules: OutputRules,
        table: TokenTable,
        start: OutputStart,
        seed: str,
    ) -> None:
        self._parsing = parsing
        self._machine = OutputMachine(rules, start, seed)
        self._text = table.text
        self._first: list[Event] = [Content(job.first_text)] if job.first_text else []
        self._joiner = None
        if rules.reasoning is not None and not parsing.separates_reasoning:
            self._joiner = _Joiner(rules.reasoning, start)
        may_be_cut = rules.tools and not parsing.is_parallel and not parsing.is_held
        self._tokens = TextTokens(table) if may_be_cut else None
        self._num_tokens = 0  # that came
        self._num_kept: int | None = None  # of a choice that is over
        self._includes_stop = job.text.includes_stop
        self.num_reasoning_tokens: int | None = None

    @property
    def is_over(self) -> bool:
        return self._machine.is_over and not self._parsing.is_held

    @property
    def has_open_call(self) -> bool:
        return self._machine.has_open_call

    def push(self, update: ChoiceUpdate) -> tuple[list[Event], ChoiceUpdate]:
        """A choice that is over counts tokens up to its end and ignores later ones."""
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
        first, self._first = self._first, []
        return first + self._shown(events), update

    def _shown(self, events: list[Event]) -> list[Event]:
        if self._joiner is not None:
            return self._joiner.join(events)
        if self._parsing.shows_reasoning:
            return events
        return [event for event in events if not isinstance(event, Reasoning)]

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
        """An ending token has no text of its own, unless the client asked for it."""
        is_ended = finished.reason == "stop" and not isinstance(finished.stop_reason, str)
        return finished.num_tokens - (is_ended and not self._includes_stop)

    def finish_reason(self, finished: Finished) -> str:
        """A text that was cut, by its length or by a stop string inside a call, does not end in a
        call."""
        has_calls = self._machine.num_calls and not self._machine.has_open_call
        if finished.reason != "stop" or not has_calls or self._parsing.is_named:
            return finished.reason
        return "function_call" if self._parsing.is_legacy else "tool_calls"


class _Joiner:
    """Makes reasoning a part of the content, with the markers that the model wrote."""

    def __init__(self, reasoning: ReasoningFormat, start: OutputStart) -> None:
        opening = reasoning.open + reasoning.label
        self._open = "" if start == OutputStart.REASONING else opening
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
    """Counts by the bytes of the tokens, independent of how many tokens arrive together: that
    depends on drafts and load."""

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
        """The number of tokens that wrote the first ``num_chars`` of the text; the last token may
        have written more."""
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

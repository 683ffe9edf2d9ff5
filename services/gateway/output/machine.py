"""Splits the text of a choice into reasoning, content and calls of tools as it comes. Pure.

    rules = OutputRules(                       # one for a request
        tools=find_tool_format(...), reasoning=REASONING_FORMATS.get(...),
        added_tokens={...},                    # texts of the vocabulary's added tokens
        functions={"name": schema of its parameters}, is_parallel=True,
    )
    machine = OutputMachine(rules, accepted.start, seed=f"{request}/{choice}")
    events = machine.push(text, marks)         # with each Delta
    events = machine.finish()                  # once, at the end

The events of a whole reply are those of the stream, one after the other: the same text and marks
make the same events, joined, wherever they are cut. Equal calls of ``push`` give calls of tools
the same ids, so a replay changes none.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.gateway.output.events import Event, TokenMark
from shared.dialects.formats import ReasoningFormat, ToolFormat
from shared.messages import OutputStart


@dataclass(frozen=True)
class OutputRules:
    """What is looked for in the output of a request.

    ``tools`` None: calls are not looked for, and what would be one is content; ``reasoning`` None:
    nor is reasoning. A marker that is one of ``added_tokens`` is found by its Mark alone, any
    other in the text. ``functions`` are the tools, by name, with the JSON schemas of their
    parameters. Unless ``is_parallel``, what follows the first call is dropped.
    """

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    added_tokens: Container[str] = frozenset()
    functions: Mapping[str, Any] = field(default_factory=dict)
    is_parallel: bool = True


class OutputMachine:
    """``num_calls`` have begun. ``is_over``: nothing that follows is of interest, so the choice may
    be cancelled."""

    num_calls: int
    is_over: bool

    def __init__(self, rules: OutputRules, start: OutputStart, seed: str) -> None:
        raise NotImplementedError

    def push(self, text: str, marks: Sequence[TokenMark] = ()) -> list[Event]:
        """The next part of the choice's text, and the marks that came with it, in order."""
        raise NotImplementedError

    def finish(self) -> list[Event]:
        """What was held back."""
        raise NotImplementedError

    def num_reasoning_tokens(self, num_tokens: int) -> int | None:
        """How many of the choice's ``num_tokens`` were reasoning, its markers not counted; None:
        that cannot be told, because a marker was text."""
        raise NotImplementedError

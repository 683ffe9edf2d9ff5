"""One Guide from a client's constraints: format, tools, reasoning. Pure; nothing is compiled."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import msgspec

from services.tokenizer.guides.calls import Calls
from services.tokenizer.guides.channels import Frame, FramedCalls, frame_of
from services.tokenizer.guides.lark import AddedTokens, Lark
from services.tokenizer.guides.limits import Totals, invalid
from services.tokenizer.guides.parts import choice_part, grammar_part, json_part, regex_part
from services.tokenizer.guides.schema import checked, read_json
from services.tokenizer.guides.structural_tag import structural_tag
from services.tokenizer.guides.tools import read_tools
from shared.dialects.formats import Channels, ReasoningFormat, ToolFormat
from shared.wire.messages import Guide, OutputFormat, OutputStart, ToolChoice


@dataclass(frozen=True)
class Dialect:
    """How the model writes: ``added`` are the ids of its added tokens by text, ``encode`` makes ids
    of a text. Without ``tools`` or ``reasoning`` it calls none, or does not reason."""

    added: Mapping[str, int]
    encode: Callable[[str], list[int]]
    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None

    @property
    def channels(self) -> Channels | None:
        formats = (each for each in (self.tools, self.reasoning) if each is not None)
        return next((each.channels for each in formats if each.channels), None)

    @cached_property
    def added_tokens(self) -> AddedTokens:
        return AddedTokens(self.added)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A client's constraints on a text. ``tools`` is a JSON array; ``budget`` counts tokens of
    reasoning."""

    format: OutputFormat | None = None
    tools: str = ""
    choice: ToolChoice | None = None
    budget: int | None = None


def compose(
    dialect: Dialect, wanted: Wanted, start: OutputStart, totals: Totals | None = None
) -> Guide | None:
    """None: any text will do. ``totals`` count its schemas. Raises InvalidRequest naming the
    field."""
    gate = _gate(dialect, start)
    lark = Lark(dialect.added_tokens, param_of(wanted))
    frame = frame_of(lark, dialect.channels, start, dialect.tools)
    answer = _answer(lark, dialect, wanted, frame, start, totals or Totals())
    if wanted.budget is not None:
        gate = _limited(dialect, gate, wanted.budget, start)
    if answer is None:
        return gate if gate.budget is not None else None
    if not gate.close_ids and not (frame is not None and frame.has_reasoning):
        answer = _after_text_markers(lark, dialect.reasoning, answer, start)
    return msgspec.structs.replace(gate, grammar=lark.written(answer))


def param_of(wanted: Wanted) -> str:
    """The field that an error of the whole grammar names."""
    is_required = wanted.choice is not None and wanted.choice.kind == "required"
    return "tools" if wanted.format is None or is_required else wanted.format.param


def _answer(
    lark: Lark,
    dialect: Dialect,
    wanted: Wanted,
    frame: Frame | None,
    start: OutputStart,
    totals: Totals,
) -> str | None:
    """The expression for the text after the reasoning; None: any text."""
    format, choice = wanted.format, wanted.choice or ToolChoice("auto")
    calls = _calls(lark, dialect, wanted, frame, totals)
    if calls is not None and choice.kind == "required":
        if format is not None:  # it holds for nothing, but a wrong one is an error all the same
            format_part(Lark(dialect.added_tokens, format.param), format, totals)
        return _after_answer(lark, dialect.reasoning, "", calls.required(choice.is_parallel))
    if format is None:
        return _in_text(lark, dialect.reasoning, calls, choice) if calls is not None else None
    answer = _framed(lark, dialect.reasoning, frame, format_part(lark, format, totals), start)
    if calls is None:
        return answer
    marked = calls.required(choice.is_parallel, has_marker=True)  # else it may begin as the answer
    return f"{lark.rule(marked)} | {lark.rule(answer)}"


def _framed(
    lark: Lark,
    reasoning: ReasoningFormat | None,
    frame: Frame | None,
    answer: str,
    start: OutputStart,
) -> str:
    """``answer`` with the markers around it."""
    if frame is not None:
        return frame.answer(answer)
    if start is not OutputStart.ANSWER:
        answer = f"{lark.blanks()} ({answer})"
    if reasoning is None or not reasoning.answer_open:
        return answer
    closes = filter(None, (reasoning.answer_close, *reasoning.ends))
    after = [f"({lark.blanks()} {lark.fixed(close)})?" for close in closes]
    return " ".join([f"({lark.blanks()} {lark.fixed(reasoning.answer_open)})?", answer, *after])


def _in_text(
    lark: Lark, reasoning: ReasoningFormat | None, calls: Calls | FramedCalls, choice: ToolChoice
) -> str:
    """Any text, and calls."""
    if reasoning is None or not reasoning.ends:
        return calls.in_text(choice.is_parallel)
    required = f"({calls.required(choice.is_parallel)})?"
    return _after_answer(lark, reasoning, lark.any_text(), required)


def _after_answer(lark: Lark, reasoning: ReasoningFormat | None, answer: str, calls: str) -> str:
    """Calls, after an answer if its markers are none of theirs."""
    if reasoning is None or not reasoning.ends:
        return calls
    opening, close, *ends = (
        f"({lark.fixed(text)})?" for text in (reasoning.answer_open, *reasoning.ends)
    )
    return " ".join([opening, answer, close, calls, *ends])


def _calls(
    lark: Lark, dialect: Dialect, wanted: Wanted, frame: Frame | None, totals: Totals
) -> Calls | FramedCalls | None:
    """The calls that a grammar has to hold; None: there are none."""
    choice = wanted.choice or ToolChoice("auto")
    if not wanted.tools or choice.kind == "none":
        return None
    tools = read_tools(wanted.tools, choice, totals)
    is_required = choice.kind == "required"
    is_held = is_required or choice.names or any(tool.is_strict for tool in tools)
    if not is_held and wanted.format is None:
        return None
    if dialect.tools is None:
        if is_required:
            raise invalid("tool_choice", "the model has no format for calls (tool-call-parser)")
        return None
    if not tools:
        return None
    return FramedCalls(frame, tools) if frame is not None else Calls(lark, dialect.tools, tools)


def _gate(dialect: Dialect, start: OutputStart) -> Guide:
    """Where the reasoning ends, if its markers are tokens."""
    reasoning, added = dialect.reasoning, dialect.added
    if reasoning is None or start is OutputStart.ANSWER or reasoning.close not in added:
        return Guide()
    is_open = start is OutputStart.REASONING
    if not is_open and reasoning.open not in added:
        return Guide()
    return Guide(
        is_open=is_open,
        open_ids=[] if is_open else [added[reasoning.open]],
        close_ids=[added[reasoning.close]],
    )


def _limited(dialect: Dialect, gate: Guide, budget: int, start: OutputStart) -> Guide:
    """``gate`` with a limit on the tokens of reasoning; at the limit its end is forced."""
    param = "reasoning_budget"
    if dialect.reasoning is None:
        raise invalid(param, "the model has no format of reasoning (reasoning-parser)")
    if start is OutputStart.ANSWER:
        return gate
    if not gate.close_ids:
        raise invalid(param, "the markers of the model's reasoning are no tokens")
    (close,) = gate.close_ids
    forced = dialect.encode(dialect.reasoning.forced_close)
    forced = forced[: forced.index(close) + 1] if close in forced else [close]
    return msgspec.structs.replace(gate, budget=budget, forced_ids=forced)


def _after_text_markers(
    lark: Lark, reasoning: ReasoningFormat | None, answer: str, start: OutputStart
) -> str:
    """The grammar itself allows reasoning if no token marks its end."""
    if reasoning is None or start is OutputStart.ANSWER:
        return answer
    closed = lark.lazy(reasoning.close)
    if start is OutputStart.REASONING:
        return f"{closed} ({answer})"
    return f"({lark.fixed(reasoning.open)} {closed})? ({answer})"


def format_part(lark: Lark, format: OutputFormat, totals: Totals) -> str:
    """Adds the rules of ``format`` to ``lark`` and returns the expression for it.

    Raises InvalidRequest with the place in the client's request as ``param``.
    """
    value, param = format.value, format.param
    match format.kind:
        case "json_object":
            return json_part(lark, {"type": "object"}, format)
        case "json_schema":
            schema = checked(read_json(value, param), param, totals, format.is_strict)
            return json_part(lark, schema, format)
        case "regex":
            return regex_part(lark, value, param)
        case "choice":
            return choice_part(lark, value, param)
        case "grammar":
            return grammar_part(lark, value, param)
        case "structural_tag":
            return structural_tag(lark, format, totals)

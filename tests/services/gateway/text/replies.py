"""Outputs of choices, cut in any way, and their events."""

import random
import re
from collections.abc import Iterable, Iterator
from typing import Any

from services.gateway.chat.replies.choice_parser import (
    Arguments,
    CallStart,
    Content,
    Event,
    Reasoning,
)
from services.gateway.text.machine import OutputMachine, OutputRules, TokenMark
from shared.dialects.known import KNOWN
from shared.wire.messages import OutputStart

FUNCTIONS: dict[str, Any] = {
    "now": {"type": "object", "properties": {}},
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"$ref": "#/$defs/tags"},
            "any": {},
        },
        "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
    },
}
Pieces = list[tuple[str, list[TokenMark]]]
Told = tuple[str, ...]


def rules(tools: str = "", reasoning: str = "", **others: Any) -> OutputRules:
    return OutputRules(
        **{
            "tools": KNOWN.tools.get(tools),
            "reasoning": KNOWN.reasoning.get(reasoning),
            "functions": FUNCTIONS,
            **others,
        }
    )


def markers_of(of: OutputRules) -> set[str]:
    """Markers that could be added tokens."""
    formats = [each for each in (of.tools, of.reasoning) if each is not None]
    parts = {text for each in formats for text in each.tokens}
    texts = {text for each in formats for text in each.markers}
    whole = {text for text in texts if not any(part in text for part in parts)}
    return parts | {text for text in whole if re.fullmatch(r"[<\[].*[>\]]", text)}


def run(of: OutputRules, pieces: Pieces, start: OutputStart, seed: str = "id/0") -> list[Event]:
    machine = OutputMachine(of, start, seed)
    events = [event for text, marks in pieces for event in machine.push(text, marks)]
    return events + machine.finish()


def told(events: Iterable[Event]) -> list[Told]:
    """Events with consecutive ones of a kind joined, without ids."""
    joined: list[Told] = []
    for event in events:
        match event:
            case CallStart():
                joined.append(("call", event.name, ""))
            case Arguments():
                kind, name, text = next(each for each in reversed(joined) if each[0] == "call")
                joined[joined.index((kind, name, text))] = (kind, name, text + event.text)
            case Content() | Reasoning():
                kind = type(event).__name__.lower()
                before = joined.pop()[1] if joined and joined[-1][0] == kind else ""
                joined.append((kind, before + event.text))
    return joined


def marks_of(text: str, markers: Iterable[str]) -> list[TokenMark]:
    """Each of ``markers`` in ``text`` is a token, and so is every other character."""
    pattern = re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))) or "$^")
    marks: list[TokenMark] = []
    index = end = 0
    for found in pattern.finditer(text):
        index += found.start() - end
        marks.append(TokenMark(found.start(), len(found.group()), index, found.group()))
        index, end = index + 1, found.end()
    return marks


def hidden(text: str, marks: list[TokenMark]) -> tuple[str, list[TokenMark]]:
    """``text`` without its marks, as with special tokens hidden."""
    shown, end, moved = "", 0, []
    for mark in marks:
        shown += text[end : mark.position]
        moved.append(TokenMark(len(shown), 0, mark.index, mark.text))
        end = mark.position + mark.num_chars
    return shown + text[end:], moved


def cut(text: str, marks: list[TokenMark], places: Iterable[int]) -> Pieces:
    """``text`` in pieces that end at ``places``, each mark with the first of its characters."""
    left = list(marks)
    pieces: Pieces = []
    begin = 0
    for end in (*places, len(text)):
        here = [mark for mark in left if mark.position < end or end == len(text)]
        left = left[len(here) :]
        pieces.append((text[begin:end], here))
        begin = end
    return pieces


def all_cuts(text: str, marks: list[TokenMark], num_random: int) -> Iterator[Pieces]:
    """Whole, by characters, and cut at random."""
    yield cut(text, marks, [])
    yield cut(text, marks, range(1, len(text)))
    randomly = random.Random(text)
    for _ in range(num_random):
        num_cuts = randomly.randint(1, 12)
        yield cut(text, marks, sorted(randomly.choices(range(len(text) + 1), k=num_cuts)))

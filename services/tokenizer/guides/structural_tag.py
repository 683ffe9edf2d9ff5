"""Structural tags: texts with some parts in a given form, in the two formats of clients.

The newer is a tree of formats, ``{"format": {"type": "tag", …}}``, the older a list of
``structures`` after ``triggers`` in free text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.tokenizer.guides.lark import Lark, literal, regex
from services.tokenizer.guides.limits import (
    MAX_DEPTH,
    MAX_REPEATS,
    MAX_TAG_NODES,
    Totals,
    check_limit,
    check_regex,
    invalid,
)
from services.tokenizer.guides.parts import grammar_part, json_part
from services.tokenizer.guides.schema import checked, read_json
from shared.wire.messages import OutputFormat


@dataclass(frozen=True, slots=True)
class Fixed:
    text: str


@dataclass(frozen=True, slots=True)
class Regular:
    """An expression that may stand in a terminal."""

    body: str


@dataclass(frozen=True, slots=True)
class AnyText:
    pass


@dataclass(frozen=True, slots=True)
class TagPart:
    """``has_end``: its end is recognizable without the text after it."""

    body: str
    has_end: bool = True


Piece = Fixed | Regular | AnyText | TagPart


def structural_tag(lark: Lark, format: OutputFormat, totals: Totals) -> str:
    """Raises InvalidRequest for an invalid tag, or one that no grammar can express."""
    tag = read_json(format.value, format.param)
    writer = _Writer(lark, format, totals)
    if not isinstance(tag, dict):
        raise invalid(format.param, "a structural tag is an object")
    if tag.get("format") is not None:
        pieces = writer.pieces(tag["format"], f"{format.param}.format", 1)
    else:
        pieces = [writer.structures(tag, format.param)]
    return writer.joined(pieces, format.param).body


class _Writer:
    def __init__(self, lark: Lark, format: OutputFormat, totals: Totals) -> None:
        self._lark = lark
        self._format = format
        self._totals = totals
        self._num_nodes = 0

    def pieces(self, node: Any, path: str, depth: int) -> list[Piece]:
        """The consecutive pieces of ``node``."""
        self._num_nodes += 1
        check_limit(path, "formats in a structural tag", self._num_nodes, MAX_TAG_NODES)
        check_limit(path, "levels of a structural tag", depth, MAX_DEPTH)
        if not isinstance(node, dict):
            raise invalid(path, "a format is an object with a type")
        match node:
            case {"type": "const_string", "value": str(text)}:
                return [Fixed(text)]
            case {"type": "any_text", **others} if not others.get("excludes"):
                return [AnyText()]
            case {"type": "regex", "pattern": str(pattern)}:
                check_regex(f"{path}.pattern", pattern)
                return [Regular(regex(pattern))]
            case {"type": "grammar", "grammar": str(grammar)}:
                return [TagPart(grammar_part(self._lark, grammar, f"{path}.grammar"))]
            case {"type": "json_schema", "json_schema": schema, **others} if (
                others.get("style", "json") == "json"
            ):
                return [TagPart(self._json(schema, f"{path}.json_schema"))]
            case {"type": "sequence", "elements": [*elements]}:
                return [
                    piece
                    for index, each in enumerate(elements)
                    for piece in self.pieces(each, f"{path}.elements[{index}]", depth + 1)
                ]
            case {"type": "tag"} | {"begin": _, "content": _, "end": _}:  # a list of tags says so
                return self._tag(node, path, depth)
        return [self._composed(node, path, depth)]

    def _composed(self, node: dict[str, Any], path: str, depth: int) -> TagPart:
        match node:
            case {"type": "or", "elements": [_, *_] as elements}:
                parts = [
                    self._part(each, f"{path}.elements[{index}]", depth + 1)
                    for index, each in enumerate(elements)
                ]
                return self._either(parts)
            case {"type": "optional" | "plus" | "star" as kind, "content": content}:
                sign = {"optional": "?", "plus": "+", "star": "*"}[kind]
                part = self._part(content, f"{path}.content", depth + 1)
                if kind != "optional":
                    self._check_end(part, path)
                return TagPart(f"({part.body}){sign}", part.has_end)
            case {"type": "repeat", "min": int(low), "max": int(high), "content": content}:
                return self._repeated(low, high, content, path, depth)
            case {"type": "triggered_tags", "triggers": [*triggers], "tags": [*tags]}:
                return self._triggered(triggers, tags, node, path, depth)
            case {"type": "tags_with_separator", "tags": [_, *_], "separator": str()}:
                return self._separated(node, path, depth)
        kind = str(node.get("type", "null"))[:60]
        fields = ", ".join(sorted(node.keys() - {"type"}))[:200]
        raise invalid(path, f"a format of type {kind} with the fields {fields} cannot be held")

    def _tag(self, node: dict[str, Any], path: str, depth: int) -> list[Piece]:
        match node:
            case {"begin": str(begin), "content": content, "end": str(end)}:
                ends = [end]
            case {"begin": str(begin), "content": content, "end": [str(), *_] as ends}:
                if not all(isinstance(each, str) for each in ends):
                    raise invalid(f"{path}.end", "an end is a string")
            case _:
                raise invalid(path, "a tag has a begin, a content and an end")
        inner = self.pieces(content, f"{path}.content", depth + 1)
        if len(ends) == 1:
            return [Fixed(begin), *inner, Fixed(ends[0])]
        parts = [self.joined([Fixed(begin), *inner, Fixed(each)], path) for each in ends]
        return [self._either(parts)]

    def _part(self, node: Any, path: str, depth: int) -> TagPart:
        return self.joined(self.pieces(node, path, depth), path)

    def _either(self, parts: Sequence[TagPart]) -> TagPart:
        body = " | ".join(part.body for part in parts)
        return TagPart(self._lark.rule(body), all(part.has_end for part in parts))

    def _repeated(self, low: int, high: int, content: Any, path: str, depth: int) -> TagPart:
        check_limit(path, "repetitions", max(low, high), MAX_REPEATS)
        if low < 0 or high < max(low, -1):
            raise invalid(path, f"min is {low} and max is {high}; expected 0 ≤ min ≤ max")
        part = self._part(content, f"{path}.content", depth + 1)
        self._check_end(part, path)
        return TagPart(f"({part.body}){{{low},{high}}}")

    def _separated(self, node: dict[str, Any], path: str, depth: int) -> TagPart:
        tags = [
            self._part(each, f"{path}.tags[{index}]", depth + 1)
            for index, each in enumerate(node["tags"])
        ]
        one = self._either(tags)
        body, separator = one.body, self._lark.fixed(node["separator"])
        if not node.get("stop_after_first"):
            self._check_end(one, path)
            body = f"{body} ({separator} {body})*"
        return TagPart(body if node.get("at_least_one") else f"({body})?", one.has_end)

    def structures(self, tag: dict[str, Any], path: str) -> TagPart:
        """The older form as the newer one."""
        structures, triggers = tag.get("structures"), tag.get("triggers")
        if not isinstance(structures, list) or not isinstance(triggers, list):
            raise invalid(path, "a structural tag has a format, or structures and triggers")
        for index, each in enumerate(structures):
            if not isinstance(each, dict):
                raise invalid(f"{path}.structures[{index}]", "a structure is an object")
        tags = [
            {
                "type": "tag",
                "begin": each.get("begin"),
                "content": {"type": "json_schema", "json_schema": each.get("schema", {})},
                "end": each.get("end"),
            }
            for each in structures
        ]
        return self._triggered(triggers, tags, {}, path, 1, "structures")

    def _triggered(
        self,
        triggers: list[Any],
        tags: list[Any],
        node: dict[str, Any],
        path: str,
        depth: int,
        field: str = "tags",
    ) -> TagPart:
        """Free text, in which a trigger must go on as a tag that begins with it; the client gave
        the tags as ``field``."""
        if not tags or not triggers or not all(isinstance(each, str) and each for each in triggers):
            raise invalid(path, f"triggers and {field} are lists that are not empty")
        by_trigger: dict[str, list[TagPart]] = {}
        for index, tag in enumerate(tags):
            place = f"{path}.{field}[{index}]"
            pieces = self.pieces(tag, place, depth + 1)
            first = pieces[0] if pieces else Fixed("")
            begin = first.text if isinstance(first, Fixed) else ""
            trigger = next((each for each in triggers if begin.startswith(each)), None)
            if trigger is None:
                raise invalid(place, f"its begin {begin[:60]!r} starts with no trigger")
            rest = self.joined([Fixed(begin[len(trigger) :]), *pieces[1:]], place)
            self._check_end(rest, place)
            by_trigger.setdefault(trigger, []).append(rest)
        part = self._lark.rule(
            " | ".join(
                f"{self._lark.lazy(trigger)} {self._either(rests).body}"
                for trigger, rests in by_trigger.items()
            )
        )
        return self._in_text(part, node)

    def _in_text(self, part: str, node: dict[str, Any]) -> TagPart:
        text, at_least_one = self._lark.any_text(), bool(node.get("at_least_one"))
        if node.get("stop_after_first"):
            body = part if at_least_one else f"{part} | {text}"
            return TagPart(self._lark.rule(body), at_least_one)
        return TagPart(f"{part}{'+' if at_least_one else '*'} {text}", has_end=False)

    def joined(self, pieces: Sequence[Piece], path: str) -> TagPart:
        """One after the other. Any text and an expression end at the first fixed text that follows
        and that lets them."""
        words: list[str] = []
        has_end = True
        for index, piece in enumerate(pieces):
            following = pieces[index + 1] if index + 1 < len(pieces) else None
            if index and isinstance(pieces[index - 1], AnyText | Regular) and _is_text(piece):
                continue  # written with the piece before
            match piece:
                case Fixed(text):
                    words.append(self._lark.fixed(text))
                case Regular(body):
                    words.append(self._until(body, following))
                case AnyText() if _is_text(following):
                    assert isinstance(following, Fixed)
                    words.append(self._lark.lazy(following.text))
                case AnyText():
                    words.append(self._lark.any_text())
                    has_end = False
                case TagPart(body):
                    words.append(f"({body})")
                    has_end = piece.has_end
            if not has_end and following is not None and following != Fixed(""):
                raise invalid(path, "after any_text only a const_string or a tag can be held")
        return TagPart(" ".join(words) or '""', has_end)

    def _until(self, body: str, following: Piece | None) -> str:
        if not _is_text(following):
            return self._lark.terminal(body)
        assert isinstance(following, Fixed)
        first, *others = self._lark.added.split(following.text)
        if first in self._lark.added.ids:
            return f"{self._lark.terminal(body)} {self._lark.fixed(following.text)}"
        until = self._lark.rule(f"{body} {literal(first)}", "[lazy]")
        return " ".join([until, *map(self._lark.fixed, others)])

    def _json(self, schema: Any, path: str) -> str:
        return json_part(self._lark, checked(schema, path, self._totals), self._format)

    def _check_end(self, part: TagPart, path: str) -> None:
        if not part.has_end:
            raise invalid(path, "something follows a part that ends in any_text")


def _is_text(piece: Piece | None) -> bool:
    return isinstance(piece, Fixed) and piece.text != ""

"""The rule for JSON of a schema. llguidance writes it, except for paths to integers beyond 2^53:
llguidance rounds these, and fails on integers below the 64-bit range."""

from collections.abc import Iterator
from math import ceil, floor
from typing import Any

import msgspec

from services.tokenizer.guides.lark import Lark, literal, regex
from services.tokenizer.guides.limits import invalid
from services.tokenizer.guides.schema import OPTIONS, Schema, find

BOUNDS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"}
DEFINITIONS = ("$defs", "definitions")
NO_BLANKS = "()"


class _Unwritten(Exception):
    """A schema with large integers also has keywords that are not supported here."""


def json_rule(lark: Lark, schema: Schema) -> str:
    """Its name; ``schema`` has llguidance's options. Raises InvalidRequest for large integers that
    cannot be held; read loosely, bounds among them are left out."""
    writer = _Writer(lark, schema)
    if not writer.leads_to_large(schema):
        return lark.json(schema)
    try:
        return writer.rule(schema)
    except _Unwritten as error:
        if writer.is_lenient and not writer.leads_to_large(loose := _without_large_bounds(schema)):
            return lark.json(loose)
        raise invalid(
            lark.param,
            f"integers beyond {MAX_EXACT} cannot be enforced beside {error}",
        ) from None


class _Writer:
    """Writes paths to large integers as rules, and leaves the rest to llguidance."""

    def __init__(self, lark: Lark, root: Schema) -> None:
        options = root.get(OPTIONS, {})
        self.is_lenient = bool(options.get("lenient"))
        self._lark = lark
        self._root = root
        self._shared = {name: root[name] for name in (*DEFINITIONS, OPTIONS) if name in root}
        blanks = options.get("whitespace_pattern", NO_BLANKS)
        self._blanks = "" if blanks == NO_BLANKS else f"{lark.terminal(regex(blanks))}?"
        self._references: dict[str, str] = {}  # rules by reference
        self._leads: dict[int, bool] = {}

    def leads_to_large(self, schema: Any) -> bool:
        """True if the schema or a schema it refers to has large integers."""
        if not isinstance(schema, dict | list):
            return False
        if id(schema) not in self._leads:
            self._leads[id(schema)] = False  # also for a reference to itself
            self._leads[id(schema)] = any(
                is_large(each) or self.leads_to_large(each) for each in self._within(schema)
            )
        return self._leads[id(schema)]

    def _within(self, schema: Any) -> Iterator[Any]:
        """The schemas and values in the schema, and the targets of its references."""
        if isinstance(schema, list):
            yield from schema
            return
        for name, value in schema.items():
            is_bound = name in BOUNDS and _is_integer(schema)
            if name == "$ref" and isinstance(value, str):
                yield find(self._root, value)
            elif name not in DEFINITIONS and (
                name == "const" or is_bound or isinstance(value, dict | list)
            ):
                yield value

    def rule(self, schema: Any) -> str:
        """Raises _Unwritten."""
        if not self.leads_to_large(schema):
            if not isinstance(schema, dict):
                raise _Unwritten("schemas that are no objects")
            return self._lark.json(self._shared | schema)
        return self._lark.rule(self._expression(schema))

    def _expression(self, schema: Schema) -> str:
        keys = schema.keys() - {OPTIONS, "$schema", *DEFINITIONS}
        kind = schema.get("type")
        match sorted(keys - {"type"}):
            case ["$ref"] if kind is None:
                return self._reference(schema["$ref"])
            case ["const"]:
                return self._values([schema["const"]], kind)
            case ["enum"] if isinstance(schema["enum"], list):
                return self._values(schema["enum"], kind)
            case ["anyOf" | "oneOf" as name] if kind is None and (
                isinstance(schema[name], list) and (name == "anyOf" or self.is_lenient)
            ):
                return " | ".join(self.rule(each) for each in schema[name])
        if isinstance(kind, list):
            return " | ".join(self.rule(_of_type(schema, each)) for each in kind)
        match kind:
            case "integer" if keys <= {"type", *BOUNDS}:
                return self._integer(schema)
            case "object" if keys <= {"type", "properties", "required", "additionalProperties"}:
                return self._object(schema)
            case "array" if {"items"} < keys <= {"type", "items", "minItems", "maxItems"}:
                return self._array(schema)
        raise _Unwritten(", ".join(sorted(keys)))

    def _reference(self, name: str) -> str:
        target = find(self._root, name)
        if name not in self._references:
            if name == "#" or not isinstance(target, dict):
                raise _Unwritten(f"$ref {name}")

            def body(rule: str) -> str:
                self._references[name] = rule
                return self._expression(target)

            self._lark.recursive(body)
        return self._references[name]

    def _values(self, values: list[Any], kind: Any) -> str:
        if kind is not None and not all(_has_type(each, kind) for each in values):
            raise _Unwritten("values of another type")
        large = [each for each in values if is_large(each) or self.leads_to_large(each)]
        small = [each for each in values if each not in large]
        words = [self._value(each) for each in large]
        if small:
            words.append(self._lark.json(self._shared | {"enum": small}))
        return " | ".join(words)

    def _value(self, value: Any) -> str:
        match value:
            case dict():
                fields = value.items()
                return self._list(
                    "{", [self._field(name, self._value(each)) for name, each in fields], "}"
                )
            case list():
                return self._list("[", [self._value(each) for each in value], "]")
            case _:
                return literal(msgspec.json.encode(value).decode())

    def _integer(self, schema: Schema) -> str:
        low, high = _bounds(schema)
        if low is not None and high is not None and low > high:
            raise _Unwritten(f"bounds between which there is none: {low} and {high}")
        return self._lark.terminal(regex(integers(low, high)))

    def _array(self, schema: Schema) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if most is not None and most <= max(least - 1, 0):
            raise _Unwritten(f"minItems {least} and maxItems {most}")
        item = self.rule(schema["items"])
        num_more = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        more = f"({self._spaced(literal(','), item, begins=True)}){num_more}"
        whole = self._spaced(literal("["), f"{item} {more}", literal("]"))
        return whole if least else f"{whole} | {self._list('[', [], ']')}"

    def _object(self, schema: Schema) -> str:
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if schema.get("additionalProperties") is not False or not {*required} <= properties.keys():
            raise _Unwritten("properties without a name")
        first = after = '""'  # the possible rest: before any property, and after one
        for name in reversed(properties):
            field = self._field(name, self.rule(properties[name]))
            rest, not_yet = self._lark.rule(after), self._lark.rule(first)
            first = f"{self._spaced(field, begins=True)} {rest}"
            after = f"{self._spaced(literal(','), field, begins=True)} {rest}"
            if name not in required:
                first, after = f"{first} | {not_yet}", f"{after} | {rest}"
        return f"{literal('{')} {self._lark.rule(first)} {self._spaced(literal('}'), begins=True)}"

    def _field(self, name: str, value: str) -> str:
        return self._spaced(literal(msgspec.json.encode(name).decode()), literal(":"), value)

    def _list(self, begin: str, items: list[str], end: str) -> str:
        separated = [word for item in items for word in (literal(","), item)][1:]
        return self._spaced(literal(begin), *separated, literal(end))

    def _spaced(self, *words: str, begins: bool = False) -> str:
        """``words`` with blanks between them, and also before them if it ``begins`` with blanks."""
        return f" {self._blanks} ".join(["", *words] if begins else words)


def _is_integer(schema: Schema) -> bool:
    kinds = schema.get("type")
    return "integer" in kinds and "number" not in kinds if isinstance(kinds, str | list) else False


def _has_type(value: Any, kind: Any) -> bool:
    names = {bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, str: {"string"}}
    names |= {dict: {"object"}, list: {"array"}, type(None): {"null"}}
    return bool(names[type(value)] & {*(kind if isinstance(kind, list) else [kind])})


def _of_type(schema: Schema, kind: str) -> Schema:
    """The part of it that holds for values of ``kind``."""
    if kind == "integer":
        return schema | {"type": kind}
    return {name: value for name, value in schema.items() if name not in BOUNDS} | {"type": kind}


def _bounds(schema: Schema) -> tuple[int | None, int | None]:
    """The lowest and the highest integer."""
    lows, highs = [], []
    for name in BOUNDS & schema.keys():
        value = schema[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _Unwritten(name)
        if name == "minimum":
            lows.append(ceil(value))
        elif name == "maximum":
            highs.append(floor(value))
        elif name == "exclusiveMinimum":
            lows.append(floor(value) + 1)
        else:
            highs.append(ceil(value) - 1)
    return max(lows, default=None), min(highs, default=None)


def _without_large_bounds(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_without_large_bounds(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: _without_large_bounds(value)
        for name, value in schema.items()
        if not (name in BOUNDS and is_large(value))
    }


MAX_EXACT = 1 << 53  # up to here each integer is a double


def is_large(value: object) -> bool:
    """Integers of any size as expressions: llguidance's own are doubles, and then 64 bits."""
    return isinstance(value, int) and abs(value) > MAX_EXACT


def integers(low: int | None, high: int | None) -> str:
    """An expression for the integers from ``low`` to ``high``, as JSON writes them; None: without
    end. At least one."""
    parts = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts.append(f"-({_naturals(least, None if low is None else -low)})")
    if high is None or high >= 0:
        parts.append(_naturals(max(low or 0, 0), high))
    return "|".join(parts)


def _naturals(low: int, high: int | None) -> str:
    """A regex for the integers from ``low`` to ``high`` (None: no bound), by number of digits."""
    parts = ["0"] if low == 0 else []
    low = max(low, 1)
    if high is not None and high < low:
        return "|".join(parts)
    first, last = str(low), "" if high is None else str(high)
    size = len(first)
    if len(last) == size:
        return "|".join([*parts, _between(first, last)])
    parts.append(_between(first, "9" * size))
    if not last:
        return "|".join([*parts, f"[1-9][0-9]{{{size},}}"])
    if len(last) > size + 1:
        parts.append(f"[1-9][0-9]{{{size},{len(last) - 2}}}")
    parts.append(_between("1" + "0" * (len(last) - 1), last))
    return "|".join(parts)


def _between(first: str, last: str) -> str:
    """The numbers from ``first`` to ``last``, which have the same number of digits."""
    size = len(first)
    if size == 0:
        return ""
    if first[0] == last[0]:
        rest = _between(first[1:], last[1:])
        return f"{first[0]}({rest})" if "|" in rest else first[0] + rest
    low, high = int(first[0]), int(last[0])
    parts, others = [], size - 1
    if first[1:].strip("0"):
        parts.append(f"{low}({_between(first[1:], '9' * others)})")
        low += 1
    if last[1:].strip("9"):
        parts.append(f"{high}({_between('0' * others, last[1:])})")
        high -= 1
    if low <= high:
        parts.append(f"[{low}-{high}]" + (f"[0-9]{{{others}}}" if others else ""))
    return "|".join(parts)

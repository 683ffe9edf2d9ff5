"""Limits on the size of a client's grammar input, checked before anything is compiled."""

import re
from dataclasses import dataclass, field

from shared.errors import InvalidRequest
from shared.wire.messages import MAX_NAME_CHARS, TOOL_NAME

MAX_DEPTH = 48  # of JSON
MAX_OPTIONAL_PROPERTIES = 400  # of one object
MAX_PROPERTIES = 5000  # like the following limits: of all schemas of a request together
MAX_ENUM_VALUES = 5000
MAX_ENUM_BYTES = 120_000
MAX_SCHEMA_BYTES = 256 << 10
MAX_CHAIN = 128  # of $ref, allOf, anyOf and oneOf
MAX_REGEX_CHARS = 16 << 10
MAX_GRAMMAR_INPUT_CHARS = 32 << 10
MAX_RULES = 1000
MAX_CHOICES_IN_LIST = 10_000
MAX_CHOICES_BYTES = 256 << 10
MAX_TAG_NODES = 1000  # of a structural tag
MAX_REPEATS = 10_000


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a request; its path is written only on request, because its names may be long and
    many."""

    parent: "Place | str"
    step: str

    def __str__(self) -> str:
        steps, place = [self.step], self.parent
        while isinstance(place, Place):
            steps.append(place.step)
            place = place.parent
        return "".join([place, *reversed(steps)])


Param = Place | str


def invalid(param: Param, problem: str, code: str = "invalid_grammar") -> InvalidRequest:
    """The error of the field at ``param``; the text begins with that path."""
    path = str(param)[:MAX_NAME_CHARS]
    return InvalidRequest(f"{path}: {problem}", param=path, code=code)


def check_limit(param: Param, things: str, number: int, limit: int) -> None:
    """Raises InvalidRequest if ``number`` is above ``limit``."""
    if number > limit:
        raise invalid(param, f"{number} {things}; the limit is {limit}")


def check_regex(param: Param, expression: str) -> None:
    check_limit(param, "characters of a regular expression", len(expression), MAX_REGEX_CHARS)
    if "\0" in expression:
        raise invalid(param, "a regular expression may not hold the character NUL")


def check_tool_name(param: Param, name: str) -> None:
    if not re.fullmatch(TOOL_NAME, name):
        raise invalid(param, f"a tool's name matches {TOOL_NAME}; this is {name[:140]!r}")


@dataclass(slots=True)
class Totals:
    """The totals over all schemas of a request.

    ``probes`` belong to schemas that are read loosely; keywords of ``unheld`` probes are left out,
    and ``left_out`` are the places of all keywords that are not enforced.
    """

    unheld: frozenset[str] = frozenset()
    probes: set[str] = field(default_factory=set)
    left_out: list[str] = field(default_factory=list)
    num_bytes: int = 0
    num_properties: int = 0
    num_enum_values: int = 0
    num_enum_bytes: int = 0

    def add_schema(self, param: Param, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        check_limit(param, "bytes of schemas", self.num_bytes, MAX_SCHEMA_BYTES)

    def add_properties(self, param: Param, num: int, num_optional: int) -> None:
        check_limit(
            param, "optional properties of an object", num_optional, MAX_OPTIONAL_PROPERTIES
        )
        self.num_properties += num
        check_limit(param, "properties in all", self.num_properties, MAX_PROPERTIES)

    def add_enum(self, param: Param, num: int, num_bytes: int) -> None:
        self.num_enum_values += num
        self.num_enum_bytes += num_bytes
        check_limit(param, "enum values in all", self.num_enum_values, MAX_ENUM_VALUES)
        check_limit(param, "bytes of enum values in all", self.num_enum_bytes, MAX_ENUM_BYTES)

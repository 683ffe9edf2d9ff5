"""Makes a recording that may be published: made-up words in place of a client's texts.

    python -m benchmarks.agents.convert raw.json tests/mesh/recorded/agents/claude-code.json.xz

The structure stays: equal texts stay equal and different ones different, in the same length, with
the same blocks, keys, ids and changed lines. Each conversion draws a new key for its words, and
nothing keeps it.
"""

import argparse
import json
import lzma
import re
import secrets
from collections.abc import Iterator
from hashlib import blake2b
from itertools import cycle
from pathlib import Path
from typing import Any

KEPT_FIELDS = {
    "$schema", "call_id", "const", "display", "effort", "format", "id", "keep", "model", "name",
    "pattern", "reasoning_effort", "role", "status", "summary", "tool_call_id", "tool_choice",
    "tool_use_id", "ttl", "type",
}  # fmt: skip
"""Fields whose texts are structure."""
KEPT_LISTS = {"enum", "include", "required"}
JSON_FIELDS = {"arguments"}
"""Texts of JSON, which keep their names."""
DROPPED_FIELDS = {"client_metadata", "metadata", "prompt_cache_key"}
"""Names of a machine and its sessions, without effect on a prompt."""

PIECES = re.compile(
    r"(?P<kept>x-anthropic-billing-header|\\u[0-9a-f]{4}|\\.)"
    r"|(?P<number>\b(?=[a-f-]*\d)[0-9a-f-]{12,}\b)"
    r"|[A-Z]?[a-z]+|[A-Z]+"
)
STRING = re.compile(r'"((?:[^"\\]|\\.)*)"(\s*:)?')
"""A text of JSON; with a colon it is a name."""
MIN_LETTERS = 3
CONSONANTS, VOWELS, HEX = "bdfghklmnprstvwz", "aeiou", "0123456789abcdef"


class Words:
    """Made-up words for the words of texts, always the same for one word."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._made: dict[str, str] = {}
        self._texts: dict[str, str] = {}  # by the texts they replace

    @property
    def are_distinct(self) -> bool:
        """Different texts are different."""
        return len(set(self._texts.values())) == len(self._texts)

    def text(self, text: str) -> str:
        if text not in self._texts:
            self._texts[text] = PIECES.sub(self._piece, text)
        return self._texts[text]

    def json(self, text: str) -> str:
        """The text of a JSON value, in which names and literals stay."""
        return STRING.sub(lambda found: found[0] if found[2] else f'"{self.text(found[1])}"', text)

    def _piece(self, match: re.Match[str]) -> str:
        piece = match.group()
        if match["kept"] or (len(piece) < MIN_LETTERS):
            return piece
        if match["number"]:
            digits = self._draw(piece)
            return "".join("-" if each == "-" else HEX[next(digits) % 16] for each in piece)
        word = self._made.setdefault(piece.lower(), self._word(piece.lower()))
        if piece.isupper():
            return word.upper()
        return word.capitalize() if piece[0].isupper() else word

    def _word(self, word: str) -> str:
        """Consonants and vowels in turn."""
        sets = zip(cycle((CONSONANTS, VOWELS)), self._draw(word), range(len(word)), strict=False)
        return "".join(letters[number % len(letters)] for letters, number, _ in sets)

    def _draw(self, text: str) -> Iterator[int]:
        number = 0
        while True:
            yield from blake2b(f"{number} {text}".encode(), key=self._key).digest()
            number += 1


def converted(value: Any, words: Words, field: str = "") -> Any:
    """A JSON value with other words."""
    match value:
        case dict():
            return {
                name: converted(each, words, name)
                for name, each in value.items()
                if name not in DROPPED_FIELDS
            }
        case list() if field in KEPT_LISTS:
            return value
        case list():
            return [converted(each, words, field) for each in value]
        case str() if field in JSON_FIELDS:
            return words.json(value)
        case str() if field not in KEPT_FIELDS:
            return words.text(value)
        case _:
            return value


def convert(recording: dict[str, Any], key: bytes) -> dict[str, Any]:
    """Raises ValueError if different texts became equal."""
    words = Words(key)
    requests = [
        request | {name: converted(request[name], words) for name in ("body", "reply")}
        for request in recording["requests"]
    ]
    if not words.are_distinct:
        raise ValueError("different texts became equal; convert again, with another key")
    return recording | {"requests": requests}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("raw", type=Path)
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    recording = convert(json.loads(arguments.raw.read_text()), secrets.token_bytes(16))
    packed = lzma.compress(json.dumps(recording, ensure_ascii=False).encode(), preset=9)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_bytes(packed)
    print(f"{len(packed)} bytes")


if __name__ == "__main__":
    main()

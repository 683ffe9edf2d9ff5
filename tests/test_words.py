"""Identifiers are in the terms of docs/glossary.md: no second word for what has one there."""

import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TERMS = {
    "coin": "random bits",
    "coins": "random bits",
    "exchange": "output collector",
    "glance": "mesh metrics",
    "nobody": "null block, null slot",
    "seat": "allocation",
    "suspect": "isolated",
    "tell": "send, log",
    "tells": "sends, logs",
    "told": "logprobs, scored",
    "trip": "open prompt",
    "wishes": "logits rules",
}
SOURCES = sorted(
    path
    for folder in ("cli", "kernels", "services", "shared")
    for path in ROOT.glob(f"{folder}/**/*.py")
)


def words_of(identifier: str) -> list[str]:
    split = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier.replace("RoundTrip", ""))
    return [word.lower() for word in split]


def test_identifiers_are_in_the_terms_of_the_glossary() -> None:
    found = [f"{path.relative_to(ROOT)}, {each}" for path in SOURCES for each in other_words(path)]
    assert not found, "\n".join(found)


def other_words(path: Path) -> Iterator[str]:
    with tokenize.open(path) as file:
        names = {
            (token.start[0], token.string)
            for token in tokenize.generate_tokens(file.readline)
            if token.type == tokenize.NAME
        }
    for line, name in sorted(names):
        for word in words_of(name.replace("round_trip", "").replace("ROUND_TRIP", "")):
            if word in TERMS:
                yield f"line {line}: {name}; the glossary says {TERMS[word]}"


def test_another_word_is_found(tmp_path: Path) -> None:
    file = tmp_path / "trips.py"
    file.write_text("round_trips = 1\nnum_told = 2\n")
    assert [*other_words(file)] == ["line 2: num_told; the glossary says logprobs, scored"]


def test_an_identifier_is_split_into_its_words():
    assert words_of("num_told") == ["num", "told"]
    assert words_of("OpenTrip") == ["open", "trip"]
    assert words_of("MAX_COINS") == ["max", "coins"]

"""Identifiers are in the terms of docs/glossary.md, and prose is in short, direct sentences."""

import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

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
ANY_TERM = re.compile("|".join(TERMS), re.IGNORECASE)
SOURCES = sorted(
    path
    for folder in ("cli", "kernels", "services", "shared", "shoal")
    for path in ROOT.glob(f"{folder}/**/*.py")
)

RELATIVE = re.compile(
    r"\b(what(ever)?|who(m|se|ever)?|those (of|that|which|who)|of which|so many|as many"
    r"|such|beside|behind|brings?|none of)\b",
    re.IGNORECASE,
)
"""Constructions that stand in for a noun; a sentence with a noun as its subject needs few."""
PAGES = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
LIMIT = 5.0  # per 1,000 words
MAX_WORDS = 54_300  # of docs/, without the bars of tables
GENERATED = {"cli.md", "exactness.md", "settings.md"}  # each new setting or column adds to them
CPP_SOURCES = sorted(each for end in ("h", "cpp") for each in ROOT.glob(f"kernels/**/*.{end}"))
FOLDERS = ("benchmarks", "cli", "kernels", "services", "shared", "shoal", "tests")
LITERAL = re.compile(
    r"```.*?```|<!--.*?-->|`+[^`]*`+|\]\([^)]*\)|https?://\S+|\"[^\"\n]*\"", re.DOTALL
)
CPP_TEXT = re.compile(r'"(?:[^"\\\n]|\\.)*"|//([^\n]*)')
PYTHON_TEXT = re.compile(r'"""(.*?)"""|#([^\n]*)|"((?:[^"\\\n]|\\.)*)"', re.DOTALL)


def words_of(identifier: str) -> list[str]:
    split = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", identifier.replace("RoundTrip", ""))
    return [word.lower() for word in split]


def test_identifiers_are_in_the_terms_of_the_glossary() -> None:
    found = [f"{path.relative_to(ROOT)}, {each}" for path in SOURCES for each in other_words(path)]
    assert not found, "\n".join(found)


def other_words(path: Path) -> Iterator[str]:
    if not ANY_TERM.search(path.read_text()):
        return
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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_few_relative_constructions(page: Path) -> None:
    rate, found = rate_of([LITERAL.sub(" ", page.read_text())])
    assert rate <= LIMIT, found


def test_a_fact_is_stated_once_so_that_the_pages_stay_short() -> None:
    pages = (page for page in ROOT.glob("docs/**/*.md") if page.name not in GENERATED)
    texts = (page.read_text() for page in pages)
    num_words = sum(any(map(str.isalnum, word)) for text in texts for word in text.split())
    assert num_words <= MAX_WORDS, "link the page or the result that states it already"


def test_the_status_is_a_table_to_decide_by() -> None:
    rows = [row for row in (ROOT / "docs/status.md").read_text().splitlines() if row[:2] == "| "]
    assert len(rows) < 60
    assert max(len(cell.strip()) for row in rows for cell in row.split("|")) <= 120


@pytest.mark.parametrize("folder", FOLDERS)
def test_the_prose_of_a_folder_has_few_relative_constructions(folder: str) -> None:
    """Of docstrings, comments and messages."""
    rate, found = rate_of(prose_of(path.read_text()) for path in ROOT.glob(f"{folder}/**/*.py"))
    assert rate <= LIMIT, found


def test_names_of_tests_have_no_relative_constructions() -> None:
    names = [
        name
        for path in ROOT.glob("tests/**/test_*.py")
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if {*name.split("_")} & {"what", "who", "whom", "those"}
    ]
    assert names == []


@pytest.mark.parametrize("path", CPP_SOURCES, ids=lambda path: path.name)
def test_the_comments_of_a_native_source_have_few_relative_constructions(path: Path) -> None:
    rate, found = rate_of([comments_of(path.read_text())])
    assert rate <= LIMIT, found


def rate_of(texts: Iterable[str]) -> tuple[float, list[str]]:
    """Relative constructions per 1,000 words, and the constructions."""
    text = " ".join(texts)
    found = [match[0] for match in RELATIVE.finditer(text)]
    return 1000 * len(found) / len(re.findall(r"[A-Za-z]+", text)), found


def prose_of(source: str) -> str:
    """Docstrings, comments and other strings of several words in a Python module."""
    texts = ("".join(match.groups("")) for match in PYTHON_TEXT.finditer(source))
    return LITERAL.sub(" ", "\n".join(text for text in texts if " " in text))


def comments_of(source: str) -> str:
    """Line comments of a C++ source."""
    return LITERAL.sub(" ", "\n".join(each[1] or "" for each in CPP_TEXT.finditer(source)))


def test_relative_constructions_are_counted_outside_literals() -> None:
    page = 'Those of `what` and "who" stand behind it.\n```\nwhat\n```\n'
    assert rate_of([LITERAL.sub(" ", page)])[1] == ["Those of", "behind"]
    source = 'x = "what"  # Who runs "what".\nraise E("none of these")\n'
    assert rate_of([prose_of(source)])[1] == ["Who", "none of"]
    source = 'f("what // who");  // None of `what` counts.\nint behind;\n'
    assert rate_of([comments_of(source)])[1] == ["None of"]

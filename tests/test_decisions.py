"""Decision records are short, dated, and listed in their index."""

import re
from pathlib import Path

import pytest

DECISIONS = Path(__file__).parents[1] / "docs" / "decisions"
RECORDS = sorted(DECISIONS.glob("[0-9]*.md"))
MAX_WORDS = 350
HEAD = re.compile(
    r"# (?P<number>\d{3}): (?P<title>[^\n]+)\n\n"
    r"Date: (?P<date>\d{4}-\d\d-\d\d)\. Status: accepted\."
)
PARTS = ("**Context.**", "**Decision.**", "**Consequence.**")


def index_rows() -> list[str]:
    lines = (DECISIONS / "README.md").read_text().splitlines()
    return sorted(line for line in lines if line.startswith("* ["))


def index_row(record: Path) -> str:
    head = HEAD.match(record.read_text())
    assert head, f"{record.name} does not begin with number, title, date and status"
    number, title, _ = head.groups()
    assert record.name.startswith(f"{number}-")
    return f"* [{number}]({record.name}): {title}"


def test_the_index_lists_every_record_with_its_title():
    assert index_rows() == [index_row(record) for record in RECORDS]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record.stem)
def test_a_record_states_context_decision_and_consequence_in_few_words(record: Path):
    text = record.read_text()
    assert len(text.split()) <= MAX_WORDS
    places = [text.find(part) for part in PARTS]
    assert -1 not in places
    assert places == sorted(places)

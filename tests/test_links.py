"""Links between our pages have a target, and the files that pages name exist."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("docs", "models", "services", "shared")
PAGES = [
    *ROOT.glob("*.md"),
    *(page for name in FOLDERS for page in (ROOT / name).glob("**/*.md")),
]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")
NAMED = re.compile(r"`(?:\.\./)*((?:\w+/)*\w+\.(?:py|h|cpp))`")


def test_each_link_leads_to_a_file_and_each_anchor_to_a_heading() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in LINK.findall(page.read_text())
        if not leads_somewhere(page.parent / target if target else page, anchor)
    ]
    assert not broken


def leads_somewhere(path: Path, anchor: str) -> bool:
    return path.exists() and (not anchor or anchor in anchors(path))


def anchors(page: Path) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_each_source_that_a_page_names_exists() -> None:
    """Decisions and the changelog name files of their day."""
    sources = [str(path) for each in ("*.*", "[!.]*/**/*.*") for path in ROOT.glob(each)]
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        if page.parent.name != "decisions" and page.name != "CHANGELOG.md"
        for name in NAMED.findall(page.read_text())
        if not any(source.endswith(f"/{name}") for source in sources)
    ]
    assert not missing

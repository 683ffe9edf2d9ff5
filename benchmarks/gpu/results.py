"""Results as files, written during the run."""

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import slug
from benchmarks.gpu.summary import aims

LEFT_OUT = ("all", "output")  # long columns, left out of tables
TOLD = ("failed", "left out", "clocks")  # lines of a section above its table


class Results:
    """``gpu-<card>-<date>.json`` and ``.md`` in ``folder``. ``sections`` hold by name their rows,
    duration, GPU clocks, and a reason if failed or left out. Sections of the same day and GPU are
    kept until they are measured again."""

    def __init__(self, folder: Path, facts: dict[str, Any]) -> None:
        self.path = folder / f"gpu-{slug(facts)}-{facts['date'][:10]}.json"
        self.sections: dict[str, dict[str, Any]] = {}
        if self.path.exists():
            self.sections = json.loads(self.path.read_text())["results"]
        self._facts = facts

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        found = self._facts | {"aims": [aim._asdict() for aim in aims(self.sections)]}
        _replace(self.path, json.dumps(found | {"results": self.sections}, indent=1) + "\n")
        _replace(self.path.with_suffix(".md"), self.text())

    def text(self) -> str:
        """The results as Markdown."""
        card = ", ".join(f"{name} {value}" for name, value in self._facts["card"].items())
        versions = ", ".join(f"{name} {value}" for name, value in self._facts["versions"].items())
        lines = [f"# GPU check, {self._facts['date']}", "", f"`{self._facts['command']}`", ""]
        lines += [f"{card}; {versions}", "", *self.aims()]
        for name, section in self.sections.items():
            lines += ["", f"## {name}", "", *_section(section)]
        return "\n".join(lines) + "\n"

    def aims(self) -> list[str]:
        """The lines of a table."""
        rows = [
            {"": aim.what, "found": aim.found, "aim": f"≥ {aim.aim}", "met": aim.is_met}
            for aim in aims(self.sections)
        ]
        return markdown(rows)


def _section(section: dict[str, Any]) -> list[str]:
    lines = [f"{section['seconds']:.1f} s"] if "seconds" in section else []
    lines += [f"{word}: {section[word]}" for word in TOLD if section.get(word)]
    for row in section["rows"]:
        lines += ["", "```", *row["output"], "```"] if "output" in row else []
    return [*lines, "", *markdown(section["rows"])]


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """The lines of a table, with the columns of all rows."""
    keys = dict.fromkeys(key for row in rows for key in row)
    names = [key for key in keys if key not in LEFT_OUT]
    if not names:
        return []
    lines = [_line(names), _line(["---"] * len(names))]
    return lines + [_line([_cell(row.get(name)) for name in names]) for row in rows]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")


def _replace(path: Path, text: str) -> None:
    """Writes atomically: a killed process leaves the old file or the new one."""
    fresh = path.with_suffix(f"{path.suffix}.new")
    fresh.write_text(text)
    os.replace(fresh, path)

"""Two results in one table."""

import json
from pathlib import Path
from typing import Any

import pytest

from cli.bench.command import main
from cli.bench.compare import differences, rows

FIGURES: dict[str, Any] = {
    "num_failed": 0,
    "errors": {"503": 3},
    "output_tokens_per_s": 100.0,
    "ttft_ms": {"mean": 8.0, "p50": 5.0},
    "late_ms": None,
    "goodput": {"targets_ms": {"ttft": 5}, "share": 0.5},
}
RESULT: dict[str, Any] = {
    "benchmark": "serve",
    "figures": FIGURES,
    "machine": {"processor": "Fish 9000", "cores": 2},
    "model": "fish",
    "settings": {"concurrency": 8, "url": "http://a"},
}


def written(folder: Path, name: str, result: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(result))
    return str(path)


def test_each_common_figure_has_a_row():
    faster = FIGURES | {"output_tokens_per_s": 150.0, "ttft_ms": {"mean": 4.0}, "goodput": {}}
    assert [*rows(FIGURES, faster)] == [
        ("num_failed", 0, 0),
        ("output_tokens_per_s", 100.0, 150.0),
        ("ttft_ms.mean", 8.0, 4.0),
    ]
    assert [name for name, _, _ in rows(FIGURES, FIGURES)][-1] == "goodput.share"


def test_other_circumstances_are_named():
    assert not [*differences(RESULT, RESULT | {"settings": RESULT["settings"] | {"url": "b"}})]
    other = RESULT | {"model": "whale", "settings": {"concurrency": 1, "trace": "a.jsonl"}}
    other["machine"] = {"processor": "Fish 9000", "cores": 1}
    assert [*differences(RESULT, other)] == [
        "different model: fish, whale",
        "different cores: 2, 1",
        "different concurrency: 8, 1",
        "different trace: None, a.jsonl",
    ]
    assert [*differences(other, RESULT)][-1] == "different trace: a.jsonl, None"


def test_the_table_has_ratios(tmp_path: Path, capsys):
    faster = RESULT | {"figures": FIGURES | {"output_tokens_per_s": 1500.0}}
    files = written(tmp_path, "a.json", RESULT), written(tmp_path, "b.json", faster)
    assert main(["compare", *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    [row] = [line for line in lines if "output_tokens_per_s" in line]
    assert [cell.strip() for cell in row.split("│")][2:5] == ["100.00", "1,500.00", "15.000"]
    [row] = [line for line in lines if "num_failed" in line]
    assert "–" in row


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (RESULT | {"benchmark": "engine"}, "different benchmarks: serve and engine"),
        ({"fish": 1}, "b.json is no result of shoal bench"),
        ([], "b.json is no result of shoal bench"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, capsys, other: Any, text: str):
    assert (
        main(["compare", written(tmp_path, "a.json", RESULT), written(tmp_path, "b.json", other)])
        == 2
    )
    assert text in capsys.readouterr().err
    assert main(["compare", str(tmp_path / "a.json"), str(tmp_path / "no.json")]) == 2
    assert "no.json: No such file" in capsys.readouterr().err

"""The processor from the kernel's file."""

from pathlib import Path

import pytest

from cli import processor
from cli.processor import cpu_field


def test_a_field_is_that_of_the_first_core(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text("model name\t: A CPU: 9\nmodel\t\t: 17\n\nmodel name\t: another\n")
    monkeypatch.setattr(processor, "CPUINFO", path)
    assert [cpu_field("model"), cpu_field("model name"), cpu_field("flags")] == [
        "17",
        "A CPU: 9",
        "",
    ]

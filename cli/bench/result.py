"""Everything a run showed, and what is needed to judge it."""

import os
import platform
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cli.bench.row import Row
from cli.bench.settings import Settings

PACKAGES = ("shoal", "aiohttp", "uvloop", "msgspec", "numpy")


@dataclass(frozen=True)
class Result:
    """``rows`` are in the order of sending; ``client_cpu_s`` is what they cost this process."""

    settings: Settings
    model: str
    rows: list[Row]
    figures: dict[str, Any]
    client_cpu_s: float
    verdict: dict[str, Any] | None = None

    @property
    def client_busy(self) -> float:
        """Share of one core."""
        return self.client_cpu_s / float(self.figures["duration_s"])

    def told(self, arguments: list[str]) -> dict[str, Any]:
        """For JSON. ``arguments`` are those of the command line."""
        told: dict[str, Any] = {
            "benchmark": "serve",
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["shoal", "bench", "serve", *_without_key(arguments)]),
            "machine": _machine(),
            "versions": {"python": platform.python_version()}
            | {package: version(package) for package in PACKAGES},
            "settings": self.settings.told(),
            "model": self.model,
            "figures": self.figures,
            "client": {"cpu_s": self.client_cpu_s, "busy": self.client_busy},
        }
        if self.verdict is not None:
            told["verdict"] = self.verdict
        if self.settings.rows:
            origin_s = min(row.started_s for row in self.rows)
            told["rows"] = [row.told(origin_s) for row in self.rows]
        return told


def _without_key(arguments: list[str]) -> list[str]:
    words = [
        "***" if before == "--api-key" else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    return ["--api-key=***" if word.startswith("--api-key=") else word for word in words]


def _machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")

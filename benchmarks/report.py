"""Results with what is needed to judge them: machine, versions, date, command."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("shoal", "torch", "pyzmq", "aiohttp", "msgspec", "tokenizers")


def spread(values: list[float]) -> dict[str, float]:
    """Median and range, rounded to a thousandth."""
    return {
        "median": round(median(values), 3),
        "min": round(min(values), 3),
        "max": round(max(values), 3),
        "runs": len(values),
    }


def write(name: str, results: dict[str, Any]) -> Path:
    """Writes ``results/<name>-<date>.json`` and prints it."""
    now = datetime.now(UTC)
    report = {
        "benchmark": name,
        "date": now.isoformat(timespec="seconds"),
        "command": " ".join(
            ["python -m", f"benchmarks.{name}", *map(_without_folder, sys.argv[1:])]
        ),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {"python": platform.python_version()}
        | {package: version(package) for package in PACKAGES},
        "results": results,
    }
    text = json.dumps(report, indent=2)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{now:%Y-%m-%d}.json"
    path.write_text(text + "\n")
    return path


def _without_folder(word: str) -> str:
    """Where things lie on this machine is nobody's business."""
    return Path(word).name if Path(word).is_absolute() else word


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":")[1].strip() for line in lines if "model name" in line), "unknown")

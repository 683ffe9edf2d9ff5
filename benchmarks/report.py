"""Results with their context: machine, versions, date, command."""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

from cli.bench.origin import described

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
    command = " ".join(["python -m", f"benchmarks.{name}", *map(_without_folder, sys.argv[1:])])
    report = described(name, command, PACKAGES) | {"results": results}
    text = json.dumps(report, indent=2)
    print(text)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}-{report['date'][:10]}.json"
    path.write_text(text + "\n")
    return path


def _without_folder(word: str) -> str:
    """Removes the local path of a file name."""
    return Path(word).name if Path(word).is_absolute() else word

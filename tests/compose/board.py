"""The Grafana board, parsed."""

import json
from pathlib import Path
from typing import Any

BOARD = Path(__file__).parent.parent.parent / "compose" / "grafana" / "boards" / "shoal.json"

Panel = dict[str, Any]


def panels() -> list[Panel]:
    """In the order of the file; panels of type ``row`` are headings."""
    return json.loads(BOARD.read_text())["panels"]


def queries() -> list[str]:
    """The PromQL of every panel, as Grafana sends it."""
    targets = (target for panel in panels() for target in panel.get("targets", []))
    return [target["expr"].replace("$__rate_interval", "1m") for target in targets]

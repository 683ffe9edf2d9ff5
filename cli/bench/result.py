"""The data of a run, and its context."""

from dataclasses import dataclass
from typing import Any

from cli.bench.origin import origin
from cli.bench.row import Row
from cli.bench.settings import Settings

PACKAGES = ("shoal", "aiohttp", "uvloop", "msgspec", "numpy")


@dataclass(frozen=True)
class Result:
    """``rows`` are in the order of sending; ``client_cpu_s`` is their cost to this process."""

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

    def as_dict(self, arguments: list[str]) -> dict[str, Any]:
        """For JSON. ``arguments`` are those of the command line."""
        report: dict[str, Any] = origin("serve", arguments, PACKAGES) | {
            "settings": self.settings.as_dict(),
            "model": self.model,
            "figures": self.figures,
            "client": {"cpu_s": self.client_cpu_s, "busy": self.client_busy},
        }
        if self.verdict is not None:
            report["verdict"] = self.verdict
        if self.settings.rows:
            origin_s = min(row.started_s for row in self.rows)
            report["rows"] = [row.as_dict(origin_s) for row in self.rows]
        return report

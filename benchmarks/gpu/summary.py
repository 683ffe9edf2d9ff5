"""Aims compared with results."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks.gpu.engine_table import ACCEPTANCE

Row = dict[str, Any]
FLOOR, DRAFTS, LOGPROBS, PENALTIES, MESH = 0.70, 1.6, 0.95, 0.95, 0.97


class Aim(NamedTuple):
    what: str
    found: float
    aim: float

    @property
    def is_met(self) -> bool:
        return self.found >= self.aim


def aims(sections: dict[str, dict[str, Any]]) -> Iterator[Aim]:
    """Aims of the measured rows."""
    engine = [
        row for name, each in sections.items() if name.startswith("engine") for row in each["rows"]
    ]
    plain = {
        row["num_rows"]: row
        for row in engine
        if row["kind"] == "graphs" and row["logprobs"] is None and not row["penalises"]
    }
    if 1 in plain and "share_of_floor" in plain[1]:
        yield Aim("of the floor, batch 1", plain[1]["share_of_floor"], FLOOR)
    yield from _drafts([row for row in engine if row["kind"] == "mtp"])
    for row in engine:
        if row["logprobs"] == 20 and (without := plain.get(row["num_rows"])):
            what = f"speed with logprobs=20, batch {row['num_rows']}"
            yield Aim(what, _ratio(row, without), LOGPROBS)
        if row["penalises"] and (without := plain.get(row["num_rows"])):
            what = f"speed with penalties, batch {row['num_rows']}"
            yield Aim(what, _ratio(row, without), PENALTIES)
    for row in sections.get("mesh", {"rows": []})["rows"]:
        is_alike = not row["min_stream_rate"] and row["waves"] == 1
        if is_alike and (without := plain.get(row["num_rows"])):
            yield Aim(
                f"speed through the mesh, batch {row['num_rows']}", _ratio(row, without), MESH
            )


def _drafts(rows: list[Row]) -> Iterator[Aim]:
    """The best depth at batch 1."""
    rates = {
        row["depth"]: row["expected_tokens_per_s"]
        for row in rows
        if row["num_rows"] == 1 and row["acceptance"] == ACCEPTANCE
    }
    if 0 in rates and len(rates) > 1:
        best = max((depth for depth in rates if depth), key=lambda depth: rates[depth])
        yield Aim(f"speed with {best} drafts, batch 1", rates[best] / rates[0], DRAFTS)


def _ratio(row: Row, other: Row) -> float:
    return float(row["decode_tokens_per_s"] / other["decode_tokens_per_s"])

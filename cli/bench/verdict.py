"""Judges from a run above a rate if the server keeps up with it."""

from collections.abc import Sequence
from typing import Any

from cli.bench.row import Row

MIN_GOOD_SHARE = 0.99
# Mean TTFT of the last third over that of the first; a larger ratio means a growing queue.
MAX_GROWTH = 2.0


def objections(rows: Sequence[Row], figures: dict[str, Any]) -> list[str]:
    """Reasons for a negative verdict; empty if the server keeps up. ``rows`` are in the order of
    sending."""
    found = []
    if figures["num_failed"]:
        found.append(f"{figures['num_failed']} of {len(rows)} requests failed")
    if "goodput" in figures and figures["goodput"]["share"] < MIN_GOOD_SHARE:
        share = figures["goodput"]["share"]
        found.append(f"{share:.1%} met the goodput targets, not {MIN_GOOD_SHARE:.0%}")
    first_ms, last_ms = thirds_ms(rows)
    if last_ms > MAX_GROWTH * first_ms:
        found.append(f"the queue grows: mean TTFT went from {first_ms:.1f} to {last_ms:.1f} ms")
    return found


def thirds_ms(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean TTFT in ms of the first and of the last third of complete answers; 0 with fewer than
    three."""
    ttfts_ms = [row.ttft_s * 1000 for row in rows if not row.error]
    if (third := len(ttfts_ms) // 3) == 0:
        return 0.0, 0.0
    return sum(ttfts_ms[:third]) / third, sum(ttfts_ms[-third:]) / third


def sentence(rate: float, load: float, duration_s: float, objections: Sequence[str]) -> str:
    """The verdict in one line. ``rate`` was tested, ``load`` was sent."""
    answer = "does not keep up" if objections else "keeps up"
    reasons = "; ".join(objections) or "no request failed and no queue grew"
    return f"{answer} with {rate:g} requests/s: at {load:g}/s for {duration_s:g} s, {reasons}"

"""The statistics of a run."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from cli.bench.row import Row

PERCENTILES = (50, 90, 99)


def figures(
    rows: Sequence[Row], targets_ms: dict[str, float], is_open_loop: bool
) -> dict[str, Any]:
    """Figures over all measured requests. Times are None without a request that has one.
    ``late_ms`` is the delay of sending, given for open loops only. Rates are over the time from the
    first request's start to the last one's end; failed requests are excluded."""
    whole = [row for row in rows if not row.error]
    duration_s = max(row.ended_s for row in rows) - min(row.started_s for row in rows)
    num_in, num_out = (
        sum(row.input_tokens for row in whole),
        sum(row.output_tokens for row in whole),
    )
    found = {
        "num_requests": len(rows),
        "num_failed": len(rows) - len(whole),
        "num_short": sum(row.output_tokens < row.max_tokens for row in whole),
        "errors": dict(Counter(row.error for row in rows if row.error).most_common()),
        "duration_s": duration_s,
        "input_tokens": num_in,
        "output_tokens": num_out,
        "requests_per_s": len(whole) / duration_s,
        "input_tokens_per_s": num_in / duration_s,
        "output_tokens_per_s": num_out / duration_s,
        "ttft_ms": spread([row.ttft_s for row in whole]),
        "tpot_ms": spread([row.tpot_s for row in whole if row.tpot_s is not None]),
        "itl_ms": spread([gap_s for row in whole for gap_s in row.itls_s]),
        "e2e_ms": spread([row.e2e_s for row in whole]),
        "late_ms": spread([row.started_s - row.due_s for row in rows if is_open_loop]),
    }
    if targets_ms:
        num_good = sum(row.meets(targets_ms) for row in rows)
        found["goodput"] = {
            "targets_ms": targets_ms,
            "share": num_good / len(rows),
            "requests_per_s": num_good / duration_s,
        }
    return found


def spread(times_s: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles in ms; None without times."""
    if not times_s:
        return None
    times_ms = np.asarray(times_s) * 1000
    percentiles = np.percentile(times_ms, PERCENTILES).tolist()
    names = (f"p{each}" for each in PERCENTILES)
    return {"mean": float(times_ms.mean()), **dict(zip(names, percentiles, strict=True))}

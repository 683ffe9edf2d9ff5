"""Reference of ``logprobs``: one row at a time, in numpy."""

import numpy as np


def logprobs_row(
    logits: np.ndarray, token: int, num_top: int | None
) -> tuple[float, int, list[float], list[int]]:
    """logits [V] → the token's logprob and rank, then values and ids of the likeliest tokens (no
    ids for the whole vocabulary)."""
    wide = logits.astype(np.float64)
    values = wide - (np.log(np.exp(wide - wide.max()).sum()) + wide.max())
    rank = 1 + int((logits > logits[token]).sum())
    if num_top is None:
        return float(values[token]), rank, values.tolist(), []
    top_ids = np.argsort(-logits, kind="stable")[:num_top]
    return float(values[token]), rank, values[top_ids].tolist(), top_ids.tolist()

"""Reference of ``sample``: one row at a time, in numpy."""

import numpy as np

from kernels.random_bits import PURPOSE_SAMPLE
from kernels.random_bits.reference import random_bits
from kernels.sample.adjust import RowChange
from kernels.sample.rows import MIN_TEMPERATURE


def sample_row(
    logits: np.ndarray,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    top_n_sigma: float,
    seed: int,
    position: int,
    choice: int,
) -> int:
    """logits [V], adjusted → the token's id."""
    if temperature < MIN_TEMPERATURE:
        return int(logits.argmax())
    scores = logits.astype(np.float64) / temperature
    scores = np.where(kept_by_top_n_sigma(scores, top_n_sigma), scores, -np.inf)
    scores = np.where(kept_by_min_p(scores, min_p), scores, -np.inf)
    scores = np.where(kept_by_top_k(scores, top_k), scores, -np.inf)
    scores = np.where(kept_by_top_p(scores, top_p), scores, -np.inf)
    return int((scores + noise(len(scores), seed, position, choice)).argmax())


def adjusted_row(logits: np.ndarray, change: RowChange) -> np.ndarray:
    """logits [V] with the request's changes; hidden ids are −inf."""
    changed = logits.astype(np.float64)
    for token in range(len(changed)):
        if len(change.allowed) and token not in change.allowed:
            changed[token] = -np.inf
    for token in change.hidden:
        changed[token] = -np.inf
    for token, bias in zip(change.biased, change.biases, strict=True):
        changed[token] += bias
    for token in change.known:
        factor = change.repetition_penalty
        changed[token] *= 1 / factor if changed[token] > 0 else factor
    for token, num in zip(change.emitted, change.num_emitted, strict=True):
        changed[token] -= change.presence_penalty + change.frequency_penalty * num
    return changed


def kept_by_top_n_sigma(scores: np.ndarray, top_n_sigma: float) -> np.ndarray:
    if top_n_sigma == 0:
        return np.full(scores.shape, True)
    deviation = scores[np.isfinite(scores)].std()
    is_kept: np.ndarray = scores >= scores.max() - top_n_sigma * deviation
    return is_kept


def kept_by_min_p(scores: np.ndarray, min_p: float) -> np.ndarray:
    is_kept: np.ndarray = np.exp(scores - scores.max()) >= min_p
    return is_kept


def kept_by_top_k(scores: np.ndarray, top_k: int) -> np.ndarray:
    if top_k == 0:
        return np.full(scores.shape, True)
    is_kept: np.ndarray = scores >= np.sort(scores)[::-1][min(top_k, len(scores)) - 1]
    return is_kept


def kept_by_top_p(scores: np.ndarray, top_p: float) -> np.ndarray:
    if top_p >= 1:
        return np.full(scores.shape, True)
    probs = np.exp(scores - scores.max())
    probs /= probs.sum()
    highest = np.sort(probs)[::-1]
    num_kept = int((np.cumsum(highest) < top_p).sum()) + 1
    is_kept: np.ndarray = probs >= highest[min(num_kept, len(highest)) - 1]
    return is_kept


def noise(vocab_size: int, seed: int, position: int, choice: int) -> np.ndarray:
    """Gumbel noise [V] of the row's random bits."""
    token_ids = np.arange(vocab_size)
    bits = random_bits(
        np.array(seed, np.int64), token_ids, np.array(position), np.array(choice), PURPOSE_SAMPLE
    )
    uniform = np.maximum((bits >> np.uint64(8)).astype(np.float64), 0.5) * 2.0**-24
    return -np.log(-np.log(uniform))

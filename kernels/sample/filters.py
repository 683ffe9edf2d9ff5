"""Temperature, and filters that set improbable tokens of each row to −inf."""

from torch import Tensor

from kernels.grammar_mask import HIDDEN
from kernels.sample.rows import RandomRows

# A nucleus is mostly small. On a CPU finding the 128 highest of 32 × 8192 takes 1 ms, sorting 15.
NUM_NUCLEUS_TRY = 128


def filtered(logits: Tensor, random: RandomRows) -> Tensor:
    """logits [N, V] → scores; all samplers apply the filters in this order."""
    params, on_host = random.params, random.on_host
    scores = logits / params.temperature[:, None]
    if (on_host.top_n_sigma > 0).any():
        scores = keep_top_n_sigma(scores, params.top_n_sigma)
    if (on_host.min_p > 0).any():
        scores = keep_min_p(scores, params.min_p)
    if on_host.top_k.any():
        scores = keep_top_k(scores, params.top_k, int(on_host.top_k.max()))
    if (on_host.top_p < 1).any():
        scores = keep_top_p(scores, params.top_p)
    return scores


def keep_top_n_sigma(scores: Tensor, top_n_sigma: Tensor) -> Tensor:
    """Keeps tokens at most ``top_n_sigma`` [N] standard deviations (over all visible logits) below
    the highest (arXiv 2411.07641); 0 keeps all. The kept set does not depend on temperature.

    scores [N, V] → [N, V]
    """
    is_hidden = scores == HIDDEN
    num = (~is_hidden).sum(-1, keepdim=True).clamp(min=1)
    mean = scores.masked_fill(is_hidden, 0).sum(-1, keepdim=True) / num
    squares = (scores - mean).square().masked_fill(is_hidden, 0)
    deviation = (squares.sum(-1, keepdim=True) / num).sqrt()
    threshold = scores.amax(-1, keepdim=True) - top_n_sigma[:, None] * deviation
    return scores.masked_fill((scores < threshold) & (top_n_sigma > 0)[:, None], HIDDEN)


def keep_min_p(scores: Tensor, min_p: Tensor) -> Tensor:
    """Keeps tokens with at least ``min_p`` [N] times the highest probability; 0 keeps all.

    scores [N, V] → [N, V]
    """
    threshold = scores.amax(-1, keepdim=True) + min_p.log()[:, None]
    return scores.masked_fill(scores < threshold, HIDDEN)


def keep_top_k(scores: Tensor, top_k: Tensor, max_top_k: int) -> Tensor:
    """Keeps every token ≥ the k-th highest score of its row; ``top_k`` [N] of 0 keeps all.

    scores [N, V] → [N, V]
    """
    vocab_size = scores.shape[-1]
    highest = scores.topk(min(max_top_k, vocab_size)).values
    index = (top_k.clamp(max=vocab_size) - 1).clamp(min=0)
    kth = highest.gather(1, index[:, None])  # [N, 1]
    is_hidden = (scores < kth) & (top_k > 0)[:, None]
    return scores.masked_fill(is_hidden, HIDDEN)


def keep_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keeps the smallest set of highest tokens with mass ≥ p, and all ties with its last.

    scores [N, V], top_p [N] → [N, V]; p of 1 keeps all.
    """
    probs = scores.softmax(-1)
    threshold = _nucleus_threshold(probs, top_p[:, None])
    is_hidden = (probs < threshold) & (top_p < 1)[:, None]
    return scores.masked_fill(is_hidden, HIDDEN)


def _nucleus_threshold(probs: Tensor, top_p: Tensor) -> Tensor:
    """The lowest probability [N, 1] in the nucleus."""
    vocab_size = probs.shape[-1]
    if probs.device.type == "cpu" and vocab_size > NUM_NUCLEUS_TRY:
        highest = probs.topk(NUM_NUCLEUS_TRY).values
        mass = highest.cumsum(-1)
        if bool((mass[:, -1:] >= top_p).all()):
            return _last_needed(highest, mass, top_p)
    highest = probs.sort(-1, descending=True).values
    return _last_needed(highest, highest.cumsum(-1), top_p)


def _last_needed(highest: Tensor, mass: Tensor, top_p: Tensor) -> Tensor:
    """``highest`` [N, K] descending with its running sums → the value at which the sum reaches p,
    [N, 1].

    If rounding leaves the whole sum below p, it is the last value.
    """
    num_before = (mass < top_p).sum(-1, keepdim=True)
    return highest.gather(1, num_before.clamp(max=highest.shape[-1] - 1))

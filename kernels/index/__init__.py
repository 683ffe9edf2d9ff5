"""The choice of keys in indexed attention (DeepSeek sparse attention, arXiv 2512.02556).

A token has an index key [dim] in a paged cache, ``num_heads`` index queries and a weight of each.
The score of an earlier token's key k, or of its own, is Σ_h weight_h · relu(query_h · k) · scale in
float32. A token that sees more than ``topk`` keys attends to the ``topk`` with the highest scores;
of equal scores the earlier key is chosen. Keys are layer-normed, and the first ``rope_dim``
elements of keys and queries are rotated.

``reference.py`` computes it token by token; torch and native code (``kernels/cpu/index.h``) serve
CPUs. There is no kernel for GPUs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from kernels.paged_attention import AttentionBatch
from kernels.rope import rope, rope_interleaved

MAX_SCORES = 4 << 20  # products of heads and keys that exist at once. Unmeasured.


class IndexSpec(NamedTuple):
    num_heads: int
    dim: int
    rope_dim: int
    topk: int
    is_interleaved: bool  # the pairs that are rotated are neighbours, not halves
    eps: float  # of the layer norm

    @property
    def scale(self) -> float:
        return float((self.dim * self.num_heads) ** -0.5)


class IndexNorm(NamedTuple):
    """The layer norm of keys: both [dim]."""

    weight: Tensor
    bias: Tensor


def write_index_keys(
    key: Tensor,
    norm: IndexNorm,
    rotation: Tensor,
    slot_mapping: Tensor,
    cache: Tensor,
    spec: IndexSpec,
) -> None:
    """Writes key [T, dim], normed and rotated by rotation [2, T, rope_dim] float32, to the entries
    ``slot_mapping`` [T] int64 of cache [num_blocks + 1, block_size, 1, 1, dim]."""
    weight, bias = norm.weight.float(), norm.bias.float()
    normed = functional.layer_norm(key.float(), (spec.dim,), weight, bias, spec.eps)
    turned = _rotated(normed[:, None], rotation, spec).squeeze(1)
    cache.view(-1, spec.dim).index_copy_(0, slot_mapping, turned.to(cache.dtype))


def choose_keys(
    query: Tensor,
    weights: Tensor,
    rotation: Tensor,
    cache: Tensor,
    attention: AttentionBatch,
    spec: IndexSpec,
) -> Tensor:
    """query [T, num_heads · dim], weights [T, num_heads]; the cache has the keys of all tokens →
    [T, num_keys] bool, true for the chosen keys, with as many as the longest row has; or [T, 0] if
    no row has more than ``topk``."""
    longest = int(attention.num_keys.max(initial=0))
    if longest <= spec.topk:
        return torch.empty(len(query), 0, dtype=torch.bool)
    chosen = torch.zeros(len(query), longest, dtype=torch.bool)
    by_head = _rotated(torch.unflatten(query, 1, (spec.num_heads, -1)), rotation, spec)
    shares = weights.float() * spec.scale
    entries = cache.view(-1, attention.block_size, spec.dim)
    starts = attention.token_starts.tolist()
    for row, num_keys in enumerate(attention.num_keys.tolist()):
        blocks = torch.from_numpy(attention.block_tables[row, : -(-num_keys // entries.shape[1])])
        keys = entries[blocks].flatten(0, 1)[:num_keys].float()
        first = 0 if attention.first_keys is None else int(attention.first_keys[row])
        start, end = starts[row : row + 2]
        step = max(1, MAX_SCORES // (spec.num_heads * num_keys))
        for token in range(start, end, step):
            part = slice(token, min(token + step, end))
            scores = (by_head[part].float() @ keys.T).relu_()  # [tokens, num_heads, num_keys]
            summed = (shares[part, None] @ scores).squeeze(1)
            seen = num_keys - end + 1 + torch.arange(part.start, part.stop)
            chosen[part, :num_keys] = _highest(summed, first, seen, spec.topk)
    return chosen


def _highest(scores: Tensor, first: int, seen: Tensor, topk: int) -> Tensor:
    """scores [tokens, num_keys], of which a token sees the keys from ``first`` up to ``seen``
    [tokens] → bool. A NaN is never chosen, like a hidden key."""
    places = torch.arange(scores.shape[1])
    is_seen = (places >= first) & (places < seen[:, None])
    hidden = scores.masked_fill(~is_seen | scores.isnan(), float("-inf"))
    order = hidden.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    chosen = torch.zeros_like(is_seen).scatter_(1, order, True) & is_seen & ~scores.isnan()
    return torch.where((seen <= topk)[:, None], is_seen, chosen)


def _rotated(x: Tensor, rotation: Tensor, spec: IndexSpec) -> Tensor:
    """[T, H, dim]"""
    cos, sin = rotation.unsqueeze(2)
    turn = rope_interleaved if spec.is_interleaved else rope
    first, rest = x[..., : spec.rope_dim], x[..., spec.rope_dim :]
    return torch.cat((turn(first, cos, sin), rest), -1)

"""Reference of the choice of keys: token by token, and head by head."""

import math

import torch
from torch import Tensor

from kernels.index import IndexNorm, IndexSpec
from kernels.rope import reference as rope


def index_key(key: Tensor, norm: IndexNorm, rotation: Tensor, spec: IndexSpec) -> Tensor:
    """key [dim], rotation [2, rope_dim] → the entry of the cache [dim] float32."""
    wide = key.float()
    off = wide - wide.mean()
    normed = off / (off.square().mean() + spec.eps).sqrt() * norm.weight.float() + norm.bias.float()
    return _rotated(normed, rotation, spec)


def choose(
    query: Tensor, weights: Tensor, rotation: Tensor, keys: Tensor, first: int, spec: IndexSpec
) -> list[int]:
    """query [num_heads · dim] and weights [num_heads] of one token, ``keys`` [num, dim] up to its
    own, of which the ``first`` ones are hidden → the places of its keys, in order."""
    if len(keys) <= spec.topk:
        return list(range(first, len(keys)))
    scores = []
    for key in keys.float():
        score = 0.0
        for head, weight in zip(query.view(spec.num_heads, -1), weights.tolist(), strict=True):
            turned = _rotated(head.float(), rotation, spec).to(query.dtype).float()
            score += weight * max(0.0, float(turned @ key)) / math.sqrt(spec.dim * spec.num_heads)
        scores.append(score)
    order = sorted(range(first, len(keys)), key=lambda place: (-scores[place], place))
    return sorted(order[: spec.topk])


def _rotated(x: Tensor, rotation: Tensor, spec: IndexSpec) -> Tensor:
    cos, sin = rotation[:, None]
    turn = rope.rope_interleaved if spec.is_interleaved else rope.rope
    turned = turn(x[None, : spec.rope_dim], cos, sin)[0]
    return torch.cat((turned, x[spec.rope_dim :]))

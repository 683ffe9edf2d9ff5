"""Reference of latent attention, with the keys and values of all heads materialized."""

import torch
from torch import Tensor

from kernels.rms_norm import Norm
from kernels.rms_norm import reference as rms_norm
from kernels.rope import reference as rope


def entries(latent: Tensor, norm: Norm, rotation: Tensor, is_interleaved: bool) -> Tensor:
    """latent [T, rank + rope_dim] → cache entries of the same shape."""
    rank = len(norm.weight)
    normed = rms_norm.rms_norm(latent[:, :rank], *norm)
    return torch.cat((normed, _rotated(latent[:, rank:], rotation, is_interleaved)), 1)


def attend(
    query: Tensor,
    rotation: Tensor,
    seen: list[Tensor],
    keys: Tensor,
    values: Tensor,
    scale: float,
    is_interleaved: bool,
) -> Tensor:
    """query [T, H * (nope_dim + rope_dim)], ``seen`` [num, rank + rope_dim] the cache entries
    visible to each token, keys [H, nope_dim, rank], values [H, value_dim, rank] → [T, H *
    value_dim] float32."""
    num_heads, nope_dim, rank = keys.shape
    by_head = torch.unflatten(query.float(), 1, (num_heads, -1))
    out = torch.empty(len(query), num_heads, values.shape[1])
    for token, kept in enumerate(seen):
        latents, shared_keys = kept[:, :rank].float(), kept[:, rank:].float()
        for head in range(num_heads):
            own = by_head[token : token + 1, head]
            rotated = _rotated(own[:, nope_dim:], rotation[:, token : token + 1], is_interleaved)
            scores = latents @ keys[head].float().T @ own[0, :nope_dim] + shared_keys @ rotated[0]
            weights = torch.softmax(scores * scale, 0)
            out[token, head] = weights @ (latents @ values[head].float().T)
    return out.flatten(1)


def _rotated(x: Tensor, rotation: Tensor, is_interleaved: bool) -> Tensor:
    cos, sin = rotation
    return (rope.rope_interleaved if is_interleaved else rope.rope)(x, cos, sin)

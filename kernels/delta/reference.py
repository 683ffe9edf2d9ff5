"""Reference of ``gated_delta``: row by row and token by token, all heads at once."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.delta.states import (
    DeltaWeights,
    LayerStates,
    LightningTerms,
    ScanTerms,
    StateRows,
)
from kernels.rope import rope

EPS = 1e-6  # of the norms of queries and keys


def gated_delta(
    x: Tensor, gates: Tensor, weights: DeltaWeights, layer: LayerStates, rows: StateRows
) -> Tensor:
    """As in ``kernels.delta``."""
    channels = weights.conv.shape[0]
    given = torch.cat([x[:, :channels], gates], 1).float()  # as drafts are kept
    outputs = []
    for row, state in enumerate(rows.states.tolist()):
        num_kept, num_drafts = int(rows.num_kept[row]), int(rows.num_drafts[row])
        num_seen = int(rows.num_seen[row])
        tokens = given[int(rows.starts[row]) : int(rows.starts[row + 1])]
        inputs = torch.cat([layer.kept[state, :num_kept], tokens])
        position, end = int(rows.positions[row]) - num_seen, len(inputs) - num_drafts
        to_copy = (position + end) // rows.interval * rows.interval - position
        matrices, columns = layer.matrices[state].clone(), layer.columns[state].clone()
        for number, token in enumerate(inputs):
            if number == end:
                _write(layer, state, matrices, columns)
            is_seen = number < num_seen
            if not is_seen:
                columns = torch.cat([columns[1:], token[None, :channels]])
            place = position + number
            y, matrices = _advance(token, place, weights, matrices, columns, is_seen)
            if number >= num_kept:
                outputs.append(y)
            copy = int(rows.copies[row])
            if num_seen < number + 1 == to_copy and copy >= 0:
                _write(layer, copy, matrices, columns)
        if not num_drafts:
            _write(layer, state, matrices, columns)
        layer.kept[state, :num_drafts] = inputs[end:]
    y = torch.stack(outputs)
    return finish(y, x[:, channels:].float().view_as(y), weights).to(x.dtype)


def finish(y: Tensor, z: Tensor, weights: DeltaWeights) -> Tensor:
    """Step 6: y and z [T, num_value_heads, value_dim] → [T, num_value_heads · value_dim]"""
    if weights.scan is None:
        normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + weights.eps)
        gate = z.sigmoid() if weights.is_by_channel else silu(z)
        return (weights.norm.float() * normed * gate).flatten(1)
    is_lightning = isinstance(weights.scan, LightningTerms)
    parts = (y if is_lightning else y * silu(z)).flatten(1).unflatten(1, (weights.num_norms, -1))
    normed = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + weights.eps)
    out: Tensor = weights.norm.float() * normed.flatten(1)
    return out * z.flatten(1).sigmoid() if is_lightning else out


def turned(heads: Tensor, norm: Tensor, rotation: Tensor, eps: float) -> Tensor:
    """Step 2 of lightning attention, without a factor: heads [T, H, key_dim] at the positions of
    ``rotation`` [2, T, R]."""
    normed = heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * norm.float()
    cos, sin = rotation[:, :, None]
    size = rotation.shape[-1]
    return torch.cat([rope(normed[..., :size], cos, sin), normed[..., size:]], -1)


def _advance(
    token: Tensor,
    position: int,
    weights: DeltaWeights,
    matrices: Tensor,
    columns: Tensor,
    is_seen: bool,
) -> tuple[Tensor, Tensor]:
    """(q, k, v) of a token with (b, a), or dt, the matrices before it, or behind it if it
    ``is_seen``, and the columns with its own → y [num_value_heads, value_dim], and the matrices
    behind it."""
    num_heads, key_dim, value_dim = matrices.shape
    num_key_heads, channels = weights.num_key_heads, weights.conv.shape[0]
    scan = weights.scan
    if isinstance(scan, LightningTerms):
        return _lightning(token, position, weights, scan, matrices, is_seen)
    mixed = torch.zeros(channels)
    if scan is not None and scan.bias is not None:
        mixed = mixed + scan.bias.float()
    for place, column in enumerate(columns):  # in this order, as native code sums
        mixed = mixed + weights.conv[:, place].float() * column
    sizes = [num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim]
    query, key, value = silu(mixed).split(sizes)
    query, key = (each.view(num_key_heads, key_dim) for each in (query, key))
    if scan is None:
        query = query * torch.rsqrt(query.square().sum(1, keepdim=True) + EPS) * key_dim**-0.5
        key = key * torch.rsqrt(key.square().sum(1, keepdim=True) + EPS)
    query, key = (each.repeat_interleave(num_heads // num_key_heads, 0) for each in (query, key))
    value = value.view(num_heads, value_dim)
    if scan is not None:
        return _scan(token[channels:], weights, scan, matrices, (query, key, value), is_seen)
    if is_seen:
        return torch.einsum("hkv,hk->hv", matrices, query), matrices
    b, a = token[channels:].split([num_heads, len(weights.dt_bias)])
    steps = softplus(a + weights.dt_bias.float()).view(num_heads, -1)  # one, or of each channel
    decay = torch.exp(-weights.decay.float().exp()[:, None] * steps)
    matrices = matrices * decay[:, :, None]
    error = value - torch.einsum("hkv,hk->hv", matrices, key)
    matrices = matrices + key[:, :, None] * (b.sigmoid()[:, None] * error)[:, None, :]
    return torch.einsum("hkv,hk->hv", matrices, query), matrices


def _scan(
    dt: Tensor,
    weights: DeltaWeights,
    scan: ScanTerms,
    matrices: Tensor,
    heads: tuple[Tensor, Tensor, Tensor],
    is_seen: bool,
) -> tuple[Tensor, Tensor]:
    """The same by Mamba-2's rule, given q, k and v of each value head."""
    query, key, value = heads
    if not is_seen:
        step = softplus(dt + weights.dt_bias.float()).clamp(*scan.limits)
        decay = torch.exp(-weights.decay.float().exp() * step)
        change = key[:, :, None] * (step[:, None] * value)[:, None, :]
        matrices = matrices * decay[:, None, None] + change
    y = torch.einsum("hkv,hk->hv", matrices, query) + scan.skip.float()[:, None] * value
    return y, matrices


def _lightning(
    token: Tensor,
    position: int,
    weights: DeltaWeights,
    terms: LightningTerms,
    matrices: Tensor,
    is_seen: bool,
) -> tuple[Tensor, Tensor]:
    """The same by lightning attention."""
    num_heads, key_dim, value_dim = matrices.shape
    query, key, value = token.split([num_heads * key_dim] * 2 + [num_heads * value_dim])
    rotation = terms.rotation[:, position, None]
    query, key = (
        turned(each.view(1, num_heads, key_dim), norm, rotation, weights.eps)[0]
        for each, norm in zip((query, key), terms.norms, strict=True)
    )
    if not is_seen:
        decay = torch.exp(-weights.decay.float().exp())[:, None, None]
        change = key[:, :, None] * value.view(num_heads, 1, value_dim)
        matrices = matrices * decay + change
    return torch.einsum("hkv,hk->hv", matrices, query * key_dim**-0.5), matrices


def _write(layer: LayerStates, state: int, matrices: Tensor, columns: Tensor) -> None:
    layer.matrices[state], layer.columns[state] = matrices, columns

"""``gated_delta`` in torch: token by token, all rows and heads at once."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.delta.places import Order, Places, Writes, ranges
from kernels.delta.reference import EPS
from kernels.delta.states import DeltaWeights, LayerStates, StateRows


class _Inputs(NamedTuple):
    """Step 1 to 3 of I inputs with H value heads each."""

    query: Tensor  # [I, H, 1, key_dim]
    key: Tensor  # [I, H, 1, key_dim]
    value: Tensor  # [I, H, 1, value_dim]
    decay: Tensor  # [I, H, 1, 1]
    beta: Tensor  # [I, H, 1, 1]


def gated_delta(
    x: Tensor, gates: Tensor, weights: DeltaWeights, layer: LayerStates, rows: StateRows
) -> Tensor:
    """As in ``kernels.delta``."""
    channels, width = weights.conv.shape
    places = Places(rows, width)
    order, writes = Order(places), Writes(rows, places)
    given = torch.cat([x[:, :channels], gates], 1).float()  # as drafts are kept
    known = torch.cat([layer.kept[_kept(rows, rows.num_kept, x)], given])
    columns = layer.columns[_index(rows.states, x)].flatten(0, 1)
    seen = torch.cat([columns, known[:, :channels]])
    openings = known[_index(order.seen[:, -1] - len(columns), x), channels:]
    inputs = _inputs(seen, openings, weights, layer, order)
    y = _recur(inputs, layer, rows, order, writes)[_index(order.tokens, x)]
    layer.columns[_index(writes.states, x)] = seen[_index(writes.columns, x)]
    drafts = ranges(rows.starts[1:] - rows.num_drafts, rows.num_drafts)
    layer.kept[_kept(rows, rows.num_drafts, x)] = given[_index(drafts, x)]
    z = x[:, channels:].float().view_as(y)
    normed = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + weights.eps)
    return (weights.norm.float() * normed * silu(z)).flatten(1).to(x.dtype)


def _inputs(
    seen: Tensor, openings: Tensor, weights: DeltaWeights, layer: LayerStates, order: Order
) -> _Inputs:
    """``seen`` are the channels of all places, ``openings`` [I, 2 · H] the (b, a) of the inputs."""
    _, num_heads, key_dim, value_dim = layer.matrices.shape
    places, num_keys = _index(order.seen, seen), weights.num_key_heads
    mixed = torch.zeros(len(places), len(weights.conv), device=seen.device)
    for place, column in enumerate(weights.conv.float().unbind(1)):  # as native code sums
        mixed = mixed + column * seen[places[:, place]]
    query, key, value = silu(mixed).split([num_keys * key_dim] * 2 + [num_heads * value_dim], 1)
    heads = [each.unflatten(1, (num_keys, key_dim)) for each in (query, key)]
    query, key = (
        each * torch.rsqrt(each.square().sum(2, keepdim=True) + EPS) * factor
        for each, factor in zip(heads, (key_dim**-0.5, 1.0), strict=True)
    )
    query, key = (
        each.repeat_interleave(num_heads // num_keys, 1)[:, :, None] for each in (query, key)
    )
    b, a = openings.chunk(2, 1)
    rates = weights.decay.float().exp() * softplus(a + weights.dt_bias.float())
    is_seen = _index(order.is_seen, seen)[:, None]
    decay = (-rates).exp().masked_fill(is_seen, 1.0)[:, :, None, None]
    beta = b.sigmoid().masked_fill(is_seen, 0.0)[:, :, None, None]
    return _Inputs(query, key, value.view(-1, num_heads, 1, value_dim), decay, beta)


def _recur(
    inputs: _Inputs, layer: LayerStates, rows: StateRows, order: Order, writes: Writes
) -> Tensor:
    """Steps 3 to 5: y [I, H, value_dim]. The matrices of the states are written on the way."""
    matrices = layer.matrices[_index(rows.states[order.rows], layer.matrices)]
    outputs, first = [matrices.new_empty(0, *inputs.value.shape[1:])], 0
    for number, num_rows in enumerate(order.nums.tolist(), 1):
        now = _Inputs(*(each[first : first + num_rows] for each in inputs))
        active = matrices[:num_rows].mul_(now.decay)
        error = now.beta * (now.value - now.key @ active)
        active.addcmul_(now.key.mT, error)
        outputs.append(now.query @ active)
        ready = np.flatnonzero(writes.num_inputs == number)
        if len(ready):
            states = _index(writes.states[ready], matrices)
            layer.matrices[states] = matrices[_index(order.places[writes.rows[ready]], matrices)]
        first += num_rows
    return torch.cat(outputs).squeeze(2)


def _kept(rows: StateRows, nums: np.ndarray, like: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the first ``nums`` [R] kept drafts of each row."""
    numbers = ranges(np.zeros_like(nums), nums)
    return _index(np.repeat(rows.states, nums), like), _index(numbers, like)


def _index(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)

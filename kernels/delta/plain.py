"""``gated_delta`` in torch: token by token, all rows and heads at once."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from kernels.delta.places import Order, Places, Writes, ranges
from kernels.delta.reference import EPS, finish, turned
from kernels.delta.states import DeltaWeights, LayerStates, LightningTerms, ScanTerms, StateRows


class _Inputs(NamedTuple):
    """Step 1 to 3 of I inputs with H value heads each."""

    query: Tensor  # [I, num_key_heads, 1, key_dim]
    key: Tensor  # [I, num_key_heads, 1, key_dim]
    value: Tensor  # [I, H, 1, value_dim]
    decay: Tensor  # [I, H, 1, 1], or by channel [I, H, key_dim, 1]
    beta: Tensor  # [I, H, 1, 1]: of a scan, the step


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
    y = _recur(inputs, weights, layer, rows, order, writes)[_index(order.tokens, x)]
    layer.columns[_index(writes.states, x)] = seen[_index(writes.columns, x)]
    drafts = ranges(rows.starts[1:] - rows.num_drafts, rows.num_drafts)
    layer.kept[_kept(rows, rows.num_drafts, x)] = given[_index(drafts, x)]
    return finish(y, x[:, channels:].float().view_as(y), weights).to(x.dtype)


def _inputs(
    seen: Tensor, openings: Tensor, weights: DeltaWeights, layer: LayerStates, order: Order
) -> _Inputs:
    """``seen`` are the channels of all places, ``openings`` [I, gates] (b, a), or dt, of the
    inputs."""
    if isinstance(weights.scan, LightningTerms):
        return _lightning(seen, weights, weights.scan, layer, order)
    _, num_heads, key_dim, value_dim = layer.matrices.shape
    places, num_keys, scan = _index(order.seen, seen), weights.num_key_heads, weights.scan
    mixed = torch.zeros(len(places), len(weights.conv), device=seen.device)
    if scan is not None and scan.bias is not None:
        mixed = mixed + scan.bias.float()
    for place, column in enumerate(weights.conv.float().unbind(1)):  # as native code sums
        mixed = mixed + column * seen[places[:, place]]
    query, key, value = silu(mixed).split([num_keys * key_dim] * 2 + [num_heads * value_dim], 1)
    query, key = (each.unflatten(1, (num_keys, key_dim)) for each in (query, key))
    if scan is None:
        query, key = (
            each * torch.rsqrt(each.square().sum(2, keepdim=True) + EPS) * factor
            for each, factor in zip((query, key), (key_dim**-0.5, 1.0), strict=True)
        )
    step = softplus(openings[:, -len(weights.dt_bias) :] + weights.dt_bias.float())
    step = step if scan is None else step.clamp(*scan.limits)
    beta = openings[:, :num_heads].sigmoid() if scan is None else step
    is_seen = _index(order.is_seen, seen)[:, None]
    decay = (-weights.decay.float().exp()[:, None] * step.unflatten(1, (num_heads, -1))).exp()
    decay = decay.masked_fill(is_seen[:, :, None], 1.0)[:, :, :, None]
    beta = beta.masked_fill(is_seen, 0.0)[:, :, None, None]
    query, key = query[:, :, None], key[:, :, None]
    return _Inputs(query, key, value.view(-1, num_heads, 1, value_dim), decay, beta)


def _lightning(
    seen: Tensor, weights: DeltaWeights, terms: LightningTerms, layer: LayerStates, order: Order
) -> _Inputs:
    """The same of lightning attention."""
    _, num_heads, key_dim, value_dim = layer.matrices.shape
    given = seen[_index(order.seen[:, -1], seen)]
    query, key, value = given.split([num_heads * key_dim] * 2 + [num_heads * value_dim], 1)
    rotation = terms.rotation[:, _index(order.positions, seen)]
    query, key = (
        turned(each.unflatten(1, (num_heads, key_dim)), norm, rotation, weights.eps) * factor
        for each, norm, factor in zip((query, key), terms.norms, (key_dim**-0.5, 1.0), strict=True)
    )
    is_seen = _index(order.is_seen, seen)[:, None, None, None]
    decay = (-weights.decay.float().exp()).exp()[None, :, None, None].expand(len(given), -1, 1, 1)
    beta = torch.ones_like(decay).masked_fill(is_seen, 0.0)
    query, key, value = query[:, :, None], key[:, :, None], value.view(-1, num_heads, 1, value_dim)
    return _Inputs(query, key, value, decay.masked_fill(is_seen, 1.0), beta)


def _recur(
    inputs: _Inputs,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: StateRows,
    order: Order,
    writes: Writes,
) -> Tensor:
    """Steps 3 to 5: y [I, H, value_dim]. The matrices of the states are written on the way."""
    matrices = layer.matrices[_index(rows.states[order.rows], layer.matrices)]
    outputs, first = [matrices.new_empty(0, *inputs.value.shape[1:])], 0
    group = matrices.shape[1] // weights.num_key_heads
    for number, num_rows in enumerate(order.nums.tolist(), 1):
        now = _Inputs(*(each[first : first + num_rows] for each in inputs))
        query, key = (each.repeat_interleave(group, 1) for each in now[:2])
        active = matrices[:num_rows].mul_(now.decay)
        change = now.value if weights.scan is not None else now.value - key @ active
        active.addcmul_(key.mT, now.beta * change)
        outputs.append(query @ active)
        ready = np.flatnonzero(writes.num_inputs == number)
        if len(ready):
            states = _index(writes.states[ready], matrices)
            layer.matrices[states] = matrices[_index(order.places[writes.rows[ready]], matrices)]
        first += num_rows
    y = torch.cat(outputs)
    if isinstance(weights.scan, ScanTerms):
        y += weights.scan.skip.float()[:, None, None] * inputs.value
    return y.squeeze(2)


def _kept(rows: StateRows, nums: np.ndarray, like: Tensor) -> tuple[Tensor, Tensor]:
    """The places of the first ``nums`` [R] kept drafts of each row."""
    numbers = ranges(np.zeros_like(nums), nums)
    return _index(np.repeat(rows.states, nums), like), _index(numbers, like)


def _index(numbers: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(numbers).to(like.device)

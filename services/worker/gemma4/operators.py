"""Gemma 4's own operators: norms of values and of parts of a row, attention to the keys of another
layer, and the gate of a token's inputs for each layer."""

from dataclasses import replace
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.operators import LANES, Kind
from kernels.paged_attention import AttentionOptions
from kernels.paged_attention import attend as attend_to
from kernels.rms_norm import rms_norm
from kernels.rope import rope
from services.worker.backends.head_limits import check_heads
from services.worker.backends.recorder import Instruction, Recorder, Value
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.context import current_context
from services.worker.layers.heads import Heads
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import NotSupported


def _refuse(ops: object) -> NotSupported:
    return NotSupported(f"Gemma 4 by {type(ops).__name__}")


@singledispatch
def attend(ops: object, x: Any, heads: Heads) -> Any:
    """``Ops.attend`` with values that are normed without a weight. Keys before their norm are
    values too if ``x`` is [T, (H + H_kv) · D]."""
    raise _refuse(ops)


@attend.register
def _(ops: TorchOps, x: Tensor, heads: Heads) -> Tensor:
    spec, norm = heads.spec, heads.query_norm
    assert norm is not None
    size, num = spec.num_kv_heads * spec.head_dim, spec.num_heads + spec.num_kv_heads
    values = x[:, -size:].unflatten(1, (-1, spec.head_dim)).float()
    normed = functional.rms_norm(values, values.shape[2:], eps=norm.eps).to(x.dtype).flatten(1)
    return ops.attend(torch.cat((x[:, : num * spec.head_dim], normed), 1), heads)


@attend.register
def _(ops: Recorder, x: Value, heads: Heads) -> Value:
    spec, width = heads.spec, ops.registers[x.register].size
    num = spec.num_heads + spec.num_kv_heads
    without_values = width == num * spec.head_dim
    found = _attended(ops, x, heads, num if without_values else num + spec.num_kv_heads)
    ops.instructions[-1] = replace(ops.instructions[-1], num=1)
    return found


@singledispatch
def attend_to_written(ops: object, x: Any, heads: Heads) -> Any:
    """Queries [T, H · D] → the output of attention [T, H · D] to keys and values that an earlier
    layer has written. ``x`` must not be used again."""
    raise _refuse(ops)


@attend_to_written.register
def _(ops: TorchOps, x: Tensor, heads: Heads) -> Tensor:
    spec, norm, kv = heads.spec, heads.query_norm, current_context().kv_caches[heads.layer]
    assert norm is not None
    split = rms_norm(x.unflatten(1, (-1, spec.head_dim)), norm.weight, norm.eps)
    query = rope(split, *ops.rotation(heads.rotary).unsqueeze(2))
    options = AttentionOptions(spec.window)
    attention = ops.attention(heads)
    attended = attend_to(query, kv.entries, attention, spec.scale, options, kv.scales)
    return attended.flatten(1)


@attend_to_written.register
def _(ops: Recorder, x: Value, heads: Heads) -> Value:
    return _attended(ops, x, heads, heads.spec.num_heads)


def _attended(ops: Recorder, x: Value, heads: Heads, num: int) -> Value:
    """``num`` counts the heads in ``x``."""
    check_heads(heads)
    spec, width = heads.spec, num * heads.spec.head_dim
    ops.written(x, width, f"attention of layer {heads.layer}")
    out, query = (ops.new(spec.num_heads * spec.head_dim, is_wide=False) for _ in range(2))
    ops.instructions.append(
        Instruction(
            kind=Kind.ATTEND,
            source=x.register,
            out=out.register,
            second=query.register,
            size=width,
            heads=heads,
        )
    )
    return out


@singledispatch
def norm_parts(ops: object, x: Any, norm: RMSNorm, residual: Any) -> Any:
    """norm(part) + residual of each part of x with the norm's size: [T, n · size]; ``residual``
    must not be used again."""
    raise _refuse(ops)


@norm_parts.register
def _(ops: TorchOps, x: Tensor, norm: RMSNorm, residual: Tensor) -> Tensor:
    parts = x.unflatten(1, (-1, len(norm.weight)))
    return residual.add_(rms_norm(parts, norm.weight, norm.eps).flatten(1))


@norm_parts.register
def _(ops: Recorder, x: Value, norm: RMSNorm, residual: Value) -> Value:
    total, size, name = ops.registers[x.register].size, len(norm.weight), "the inputs of layers"
    _check_tiles(size)
    ops.check(x, total, name)
    found = ops.written(residual, total, name)
    ops.instructions.append(
        Instruction(
            kind=Kind.NORM,
            source=x.register,
            out=residual.register,
            size=size,
            num=total // size,
            is_wide=True,
            adds=True,
            norm=norm,
        )
    )
    return found


@singledispatch
def open_inputs(ops: object, gates: Any, inputs: Any, layer: int) -> Any:
    """gelu(gates) · the inputs of a ``layer``: [T, n] and [T, layers · n] → [T, n]"""
    raise _refuse(ops)


@open_inputs.register
def _(ops: TorchOps, gates: Tensor, inputs: Tensor, layer: int) -> Tensor:
    size = gates.shape[1]
    own = inputs[:, layer * size : (layer + 1) * size]
    return functional.gelu(gates, approximate="tanh") * own


@open_inputs.register
def _(ops: Recorder, gates: Value, inputs: Value, layer: int) -> Value:
    size, total = (ops.registers[each.register].size for each in (gates, inputs))
    _check_tiles(size)
    ops.check(gates, size, "gates of inputs")
    ops.check(inputs, total, "the inputs of layers")
    out = ops.new(size, is_wide=False)
    ops.instructions.append(
        Instruction(
            kind=Kind.ACTIVATE,
            source=gates.register,
            out=out.register,
            second=inputs.register,
            size=size,
            first=layer * size,
            num=total,
            act="gelu_tanh",
        )
    )
    return out


def _check_tiles(size: int) -> None:
    if size % LANES:
        raise NotSupported(f"hidden_size_per_layer_input {size} is no multiple of {LANES}")

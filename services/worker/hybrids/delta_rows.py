"""The rows of a rank's heads in the tensors of a gated delta layer."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from services.worker.layers.parallel import Rows, Shard

Parts = Mapping[str, Shard | Rows]


class DeltaSpec(NamedTuple):
    """The sizes of a layer on all ranks, and the ``width`` of its convolution."""

    num_heads: int  # of values
    num_key_heads: int
    key_dim: int
    value_dim: int
    width: int


def channel_rows(spec: DeltaSpec, heads: Shard, key_heads: Shard) -> Shard | Rows:
    """The rows of ``heads`` in the tensor with the queries, keys and values of all heads."""
    of_keys = spec.num_key_heads * spec.key_dim
    total = 2 * of_keys + spec.num_heads * spec.value_dim
    if heads.num == heads.total:
        return Shard(0, total, total)
    query, key, value = np.split(np.arange(total), [of_keys, 2 * of_keys])
    parts = [rows_of(query, key_heads), rows_of(key, key_heads), rows_of(value, heads)]
    return Rows(np.concatenate(parts), total)


def joined_rows(*parts: Shard) -> Shard | Rows:
    """The rows of ``parts`` in one tensor, in which one whole follows the other."""
    total = sum(each.total for each in parts)
    if all(each.num == each.total for each in parts):
        return Shard(0, total, total)
    ids, before = [], 0
    for start, num, size in parts:
        ids.append(before + start + np.arange(num))
        before += size
    return Rows(np.concatenate(ids), total)


def separate_inputs(spec: DeltaSpec, heads: Shard, key_heads: Shard) -> tuple[Parts, Parts]:
    """The inputs, and the gates, of ``heads``: tensors of their own, as Qwen3.5 has them."""
    return (
        {
            "in_proj_qkv": channel_rows(spec, heads, key_heads),
            "in_proj_z": heads.times(spec.value_dim),
        },
        {"in_proj_b": heads, "in_proj_a": heads},
    )


def joined_inputs(spec: DeltaSpec, heads: Shard, key_heads: Shard) -> tuple[Parts, Parts]:
    """The same in Qwen3-Next's two tensors, in which each key head has the query, the key, and then
    the values and gates of its value heads."""
    num_shared = spec.num_heads // spec.num_key_heads
    inputs = _of_key_heads(spec, [spec.key_dim] * 2 + [num_shared * spec.value_dim] * 2)
    gates = _of_key_heads(spec, [num_shared] * 2)
    owners = key_heads, key_heads, heads, heads
    own = [rows_of(part, owner) for part, owner in zip(inputs, owners, strict=True)]
    own_gates = [rows_of(part, heads) for part in gates]
    return (
        {"in_proj_qkvz": Rows(np.concatenate(own), sum(part.size for part in inputs))},
        {"in_proj_ba": Rows(np.concatenate(own_gates), sum(part.size for part in gates))},
    )


def _of_key_heads(spec: DeltaSpec, sizes: list[int]) -> list[np.ndarray]:
    """The rows of each part, all heads one after the other; a key head's parts of ``sizes`` are
    adjacent."""
    rows = np.arange(spec.num_key_heads * sum(sizes)).reshape(spec.num_key_heads, -1)
    return [part.ravel() for part in np.split(rows, np.cumsum(sizes[:-1]), 1)]


def rows_of(rows: np.ndarray, heads: Shard) -> np.ndarray:
    """The part of ``heads`` in the ``rows`` of all."""
    of_each = rows.reshape(heads.total, -1)
    own: np.ndarray = of_each[heads.start : heads.start + heads.num].ravel()
    return own

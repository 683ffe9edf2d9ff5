"""The indexer of a layer: it chooses the keys that a token attends to (arXiv 2512.02556)."""

from functools import singledispatch
from typing import Any, cast

import torch
from torch import Tensor, nn

from kernels.cpu.index import MAX_INDEX_DIM, MAX_INDEX_HEADS, Index
from kernels.cpu.operators import LANES, Kind
from kernels.index import IndexNorm, IndexSpec, choose_keys, write_index_keys
from kernels.kv_layout import KVLayout
from kernels.paged_attention import AttentionBatch
from services.worker.backends.recorder import Instruction, Recorder, Register, Value
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.context import current_context
from services.worker.layers.kept import Cached
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import NotSupported, Ops, X
from services.worker.layers.rope import RotaryEmbedding
from services.worker.layers.weights import empty_parameter
from services.worker.machine.kv_groups import KVSpec


class LayerNorm(nn.Module):
    """Its weight and bias; the operator that writes keys applies it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.bias = empty_parameter(size)


class Indexer(Cached):
    """Has one key of a token in the KV cache. Each rank has all heads, and chooses the same keys.

    ``chosen`` is the choice of the running pass: later layers may attend to the same keys.
    """

    chosen: Any

    def __init__(
        self,
        hidden_size: int,
        query_rank: int,
        spec: IndexSpec,
        layer: int,
        rotary: RotaryEmbedding,
    ) -> None:
        super().__init__()
        self.number = layer
        self.spec = spec
        self.wq_b = Linear(query_rank, spec.num_heads * spec.dim)
        self.wk = Linear(hidden_size, spec.dim)
        self.k_norm = LayerNorm(spec.dim)
        self.weights_proj = Linear(hidden_size, spec.num_heads)
        self.rotary = rotary
        self.place = self._group = 0

    @property
    def group(self) -> int:
        return self._group

    def put_cache(self, place: int, group: int) -> None:
        self.place, self._group = place, group

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec((1, 1, self.spec.dim))

    def kv_layout(self, dtype: torch.dtype, codes: torch.dtype | None) -> KVLayout:
        """Numbers: a rounded key could change a choice."""
        return super().kv_layout(dtype, None)

    @property
    def num_scored_heads(self) -> int:
        return self.spec.num_heads

    @property
    def numbers_per_token(self) -> int:
        """Queries before and after rotation, the key, the weights and the choice."""
        spec = self.spec
        return 3 * spec.num_heads * spec.dim + 3 * spec.dim + 2 * spec.num_heads + spec.topk

    @property
    def index(self) -> Index:
        norm = IndexNorm(self.k_norm.weight, self.k_norm.bias)
        return Index(self.spec, norm, self.rotary.table, self.place, self._group)

    def forward(
        self, ops: Ops[X], x: X, query: X, norm: RMSNorm | None, query_norm: RMSNorm
    ) -> None:
        """Makes the choice for norm(x) [T, hidden] and query_norm(query) [T, query_rank]."""
        queries = ops.linear(query, self.wq_b, norm=query_norm)
        key = ops.linear(x, self.wk, norm=norm)
        weights = ops.linear(x, self.weights_proj, norm=norm)
        self.chosen = choose(ops, self, queries, key, weights)


@singledispatch
def choose(ops: object, indexer: Indexer, queries: Any, key: Any, weights: Any) -> Any:
    """The choice of keys as the operators ``ops`` have it."""
    raise NotSupported(f"indexed attention by {type(ops).__name__}")


@choose.register
def _(ops: TorchOps, indexer: Indexer, queries: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    context, index = current_context(), indexer.index
    cache, inputs = context.kv_caches[index.layer].entries, context.groups[index.group]
    rotation = ops.rotation(indexer.rotary)
    write_index_keys(key, index.norm, rotation, inputs.slot_mapping, cache, index.spec)
    attention = cast(AttentionBatch, inputs.attention)  # devices refuse the option index_topk
    return choose_keys(queries, weights, rotation, cache, attention, index.spec)


@choose.register
def _(ops: Recorder, indexer: Indexer, queries: Value, key: Value, weights: Value) -> Value:
    spec, name = indexer.spec, f"the indexer of layer {indexer.number}"
    check_sizes(spec, name)
    size = spec.num_heads * spec.dim
    for value, expected in ((queries, size), (key, spec.dim), (weights, spec.num_heads)):
        ops.check(value, expected, name)
    turned, chosen = len(ops.registers), len(ops.registers) + 1
    ops.registers += [Register(size, is_wide=False), Register(spec.topk, is_wide=True)]
    ops.instructions.append(
        Instruction(
            kind=Kind.INDEX,
            source=queries.register,
            out=chosen,
            size=size,
            index=indexer.index,
            others=(key.register, weights.register, turned),
        )
    )
    return Value(chosen, 0)


def check_sizes(spec: IndexSpec, name: str) -> None:
    """Raises NotSupported for sizes that native code lacks."""
    sizes = {
        "index_n_heads": (spec.num_heads, MAX_INDEX_HEADS),
        "index_head_dim": (spec.dim, MAX_INDEX_DIM),
    }
    for key, (size, most) in sizes.items():
        if size % LANES:
            raise NotSupported(f"{name}: {key} {size} is no multiple of {LANES}")
        if size > most:
            raise NotSupported(f"{name}: {key} {size} is above {most}")

"""An encoder's trunk on native CPU code: a prompt gets the same bits in any batch."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kernels.cpu.operators import LANES, MAX_GROUP_SIZE, MAX_HEAD_DIM, Kind, Operator, PackedHeads
from kernels.cpu.packing import NativeLibrary, gate_up_order
from kernels.cpu.program import Buffer, GroupBlocks, KVPair, NativeProgram
from kernels.paged_attention import AttentionBatch
from services.worker.layers.ops import NotSupported

# STATES and a branch's output are wide; JOINED has queries, keys and values.
IDS, POSITIONS, TYPES, STATES, BRANCH, NARROW, JOINED, QUERY, ATTENDED, INNER = range(10)
NUM_INPUTS = 3
ACTS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # of gates, besides GELU itself


class _Layer(NamedTuple):
    """A norm is applied to the input of a branch, to its output or to its sum with the states."""

    attention: Any
    projections: list[nn.Linear]  # of queries, keys and values
    output: nn.Linear
    inner: list[nn.Linear]  # gates and ups, or one of both, or of neither
    down: nn.Linear
    has_gates: bool
    of_inputs: tuple[Any, Any] = (None, None)  # of attention and MLP
    of_branches: tuple[Any, Any] = (None, None)
    of_sums: tuple[Any, Any] = (None, None)


def _bert(trunk: Any) -> Iterator[_Layer]:
    for each in trunk.encoder.layer:
        attention = each.attention.self
        yield _Layer(
            attention=attention,
            projections=[attention.query, attention.key, attention.value],
            output=each.attention.output.dense,
            inner=[each.intermediate.dense],
            down=each.output.dense,
            has_gates=False,
            of_sums=(each.attention.output.LayerNorm, each.output.LayerNorm),
        )


def _nomic(trunk: Any) -> Iterator[_Layer]:
    for each in trunk.layers:
        norms = each.post_attention_layernorm, each.post_mlp_layernorm
        yield _with_gates(each)._replace(of_sums=norms)


def _gemma(trunk: Any) -> Iterator[_Layer]:
    for each in trunk.layers:
        yield _with_gates(each)._replace(
            of_inputs=(each.input_layernorm, each.pre_feedforward_layernorm),
            of_branches=(each.post_attention_layernorm, each.post_feedforward_layernorm),
        )


def _with_gates(layer: Any) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    inner = [mlp.gate_proj, mlp.up_proj]
    return _Layer(attention, projections, attention.o_proj, inner, mlp.down_proj, has_gates=True)


def _modern(trunk: Any) -> Iterator[_Layer]:
    for each in trunk.layers:
        first = None if isinstance(each.attn_norm, nn.Identity) else each.attn_norm
        yield _Layer(
            attention=each.attn,
            projections=[each.attn.Wqkv],
            output=each.attn.Wo,
            inner=[each.mlp.Wi],
            down=each.mlp.Wo,
            has_gates=True,
            of_inputs=(first, each.mlp_norm),
        )


FAMILIES = {
    "bert": _bert,
    "roberta": _bert,
    "xlm-roberta": _bert,
    "nomic_bert": _nomic,
    "gemma3_text": _gemma,
    "modernbert": _modern,
}


class NativeTrunk:
    """Replaces the weights of ``trunk`` by packed ones, which are counted as its own. Raises
    NotSupported; ``trunk`` is then unchanged."""

    def __init__(self, trunk: Any, library: NativeLibrary, num_positions: int) -> None:
        config = trunk.config
        _check(config)
        builder = _Builder(trunk, library, num_positions)
        builder.build(list(FAMILIES[config.model_type](trunk)))
        self._program = builder.program()
        self._windows = list(builder.windows)
        self._entry = 2, builder.num_kv_heads, LANES, builder.head_dim
        self._dtype = library.dtype
        self._caches: list[KVPair] = []

    def run(
        self, ids: np.ndarray, positions: np.ndarray, types: np.ndarray, lengths: Sequence[int]
    ) -> Tensor:
        """ids, positions and types [T] of prompts of ``lengths``, whose sum is T
        → [T, hidden_size] float32"""
        inputs = [torch.from_numpy(each.astype(np.int32)) for each in (ids, positions, types)]
        groups = self._groups(np.array(lengths, np.int64))
        places = torch.from_numpy(positions.astype(np.int64))
        return self._program.run(inputs, places, groups, self._caches)

    def _groups(self, lengths: np.ndarray) -> list[GroupBlocks]:
        """The keys of a prompt lie in adjacent blocks. Each window has ends of its own."""
        nums = -(-lengths // LANES)
        first_blocks = np.cumsum(nums) - nums
        self._make_room(int(nums.sum()))
        tables = first_blocks[:, None] + np.arange(nums.max())
        starts = np.concatenate([[0], np.cumsum(lengths)])
        offsets = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
        slots = torch.from_numpy(np.repeat(first_blocks * LANES, lengths) + offsets)
        lasts = np.repeat(lengths, lengths)
        groups = []
        for window in self._windows:
            ends = lasts if window is None else np.minimum(lasts, offsets + window)
            batch = AttentionBatch(
                *(starts, lengths, tables, LANES, self._dtype, torch.device("cpu")), ends=ends
            )
            groups.append((slots, batch))
        return groups

    def _make_room(self, num_blocks: int) -> None:
        """All layers use one cache in turn."""
        if not self._caches or len(self._caches[0][0]) < num_blocks:
            self._caches = []  # before the next is there
            self._caches = [(torch.zeros(num_blocks, *self._entry, dtype=self._dtype), None)]


def _check(config: Any) -> None:
    if config.model_type not in FAMILIES:
        raise NotSupported(f"model_type {config.model_type}")
    act = _act(config)
    has_gates = FAMILIES[config.model_type] is not _bert
    if act != "gelu" and not (has_gates and act in ACTS):
        raise NotSupported(f"activation {act}")
    heads, size = config.num_attention_heads, config.hidden_size
    dim = getattr(config, "head_dim", None) or size // heads
    for name, number in (("head", dim), ("hidden", size), ("inner", config.intermediate_size)):
        if number % LANES:
            raise NotSupported(f"{name} size {number} is no multiple of {LANES}")
    group = heads // (getattr(config, "num_key_value_heads", None) or heads)
    if dim > MAX_HEAD_DIM or group > MAX_GROUP_SIZE:
        raise NotSupported(f"head size {dim}, {group} query heads for each KV head")
    if getattr(config, "attn_logit_softcapping", None):
        raise NotSupported("attn_logit_softcapping")


def _act(config: Any) -> str:
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


class _Builder:
    """Collects the operators. Wide buffers are narrow ones too if the library's type is float32."""

    def __init__(self, trunk: Any, library: NativeLibrary, num_positions: int) -> None:
        self._trunk, self._library = trunk, library
        self._config = trunk.config
        self._size = int(trunk.config.hidden_size)
        self._num_positions = num_positions
        self._operators: list[Operator] = []
        self._tables: dict[str | None, tuple[Tensor, Tensor]] = {}
        self.windows: dict[int | None, int] = {}  # → group
        self._is_wide = library.dtype == torch.float32

    def build(self, layers: list[_Layer]) -> None:
        self._find_sizes(layers[0])
        self._embed()
        for layer in layers:
            self._attend(layer)
            self._feed(layer)
        norm = getattr(self._trunk, "final_norm", None) or getattr(self._trunk, "norm", None)
        if norm is not None:
            self._norm(norm, STATES, STATES)

    def program(self) -> NativeProgram:
        wide, narrow = torch.float32, self._library.dtype
        attended = self._num_heads * self.head_dim
        sizes = [1, 1, 1, self._size, self._size, self._size, self._joined, attended, attended]
        dtypes = [*[torch.int32] * NUM_INPUTS, wide, wide, narrow, wide, narrow, narrow, narrow]
        buffers = [Buffer(*each) for each in zip([*sizes, self._inner], dtypes, strict=True)]
        return NativeProgram(self._library, self._operators, buffers, NUM_INPUTS, STATES)

    def _find_sizes(self, layer: _Layer) -> None:
        config = self._config
        self._num_heads = config.num_attention_heads
        self.num_kv_heads = getattr(config, "num_key_value_heads", None) or self._num_heads
        self.head_dim = layer.output.in_features // self._num_heads
        self._joined = (self._num_heads + 2 * self.num_kv_heads) * self.head_dim
        self._inner = layer.down.in_features

    def _add(self, kind: Kind, source: int, out: int, size: int, **more: Any) -> None:
        self._operators.append(Operator(kind=kind, source=source, out=out, size=size, **more))

    def _embed(self) -> None:
        parts = getattr(self._trunk, "embeddings", self._trunk)
        words = self._trunk.get_input_embeddings()
        self._look_up(words, IDS, STATES)
        if (scale := getattr(words, "embed_scale", None)) is not None:
            self._add(Kind.SCALE, STATES, STATES, self._size, scale=float(scale.to(words.weight)))
        for name, source in (("token_type", TYPES), ("position", POSITIONS)):
            if (table := getattr(parts, f"{name}_embeddings", None)) is not None:
                self._look_up(table, source, BRANCH)
                self._add(Kind.ADD, BRANCH, STATES, self._size)
        norm = getattr(parts, "LayerNorm", None) or getattr(parts, "norm", None)
        if parts is not self._trunk and norm is not None:
            self._norm(norm, STATES, STATES)

    def _look_up(self, table: Any, source: int, out: int) -> None:
        weight = table.weight.detach()
        self._add(Kind.EMBED, source, out, self._size, rows=weight, num=len(weight))

    def _attend(self, layer: _Layer) -> None:
        source = self._input(layer.of_inputs[0])
        self._multiply(layer.projections, source, JOINED)
        window = getattr(layer.attention, "sliding_window", None)
        group = self.windows.setdefault(window, len(self.windows))
        options = {"second": QUERY, "group": group, "heads": self._heads(layer.attention, window)}
        self._add(Kind.ATTEND, JOINED, ATTENDED, self._joined, **options)
        self._add_branch(layer.output, ATTENDED, layer.of_branches[0], layer.of_sums[0])

    def _feed(self, layer: _Layer) -> None:
        source = self._input(layer.of_inputs[1])
        act = _act(self._config)
        order = gate_up_order(self._inner) if layer.has_gates else None
        options: dict[str, Any]
        if act == "gelu":
            options = {"kind": Kind.GELU, "num": int(layer.has_gates)}
        else:
            options = {"kind": Kind.GATED, "act": ACTS[act]}
        self._multiply(layer.inner, source, INNER, order, **options)
        self._add_branch(layer.down, INNER, layer.of_branches[1], layer.of_sums[1])

    def _input(self, norm: Any) -> int:
        if norm is not None:
            self._norm(norm, STATES, NARROW)
        elif self._is_wide:
            return STATES
        else:
            self._add(Kind.NARROW, STATES, NARROW, self._size)
        return NARROW

    def _add_branch(self, linear: nn.Linear, source: int, of_branch: Any, of_sum: Any) -> None:
        """Adds the output of a branch to the states."""
        if of_branch is None:
            self._multiply([linear], source, STATES, adds=True)
        else:
            self._multiply([linear], source, BRANCH)
            self._norm(of_branch, BRANCH, STATES, adds=True)
        if of_sum is not None:
            self._norm(of_sum, STATES, STATES)

    def _norm(self, norm: Any, source: int, out: int, *, adds: bool = False) -> None:
        options = {"is_wide": out == STATES, "adds": adds, "eps": norm.eps}
        weight = norm.weight.detach().float()
        if isinstance(norm, nn.LayerNorm):
            bias = None if norm.bias is None else norm.bias.detach().float()
            self._add(Kind.LAYER_NORM, source, out, self._size, norm=weight, rows=bias, **options)
        else:  # Gemma's weights are stored minus 1
            self._add(Kind.NORM, source, out, self._size, norm=1 + weight, **options)

    def _multiply(
        self,
        linears: list[nn.Linear],
        source: int,
        out: int,
        order: np.ndarray | None = None,
        kind: Kind = Kind.LINEAR,
        **options: Any,
    ) -> None:
        """The product with the joined weights, which remain in the first of ``linears``."""
        weight = torch.cat([each.weight.detach() for each in linears])
        biases = [each.bias.detach() for each in linears if each.bias is not None]
        packed = self._library.pack(weight, torch.cat(biases) if biases else None, order)
        for each in linears:
            each.weight.data = each.weight.data.new_empty(0)
        linears[0].weight.data = packed.tiles
        self._add(kind, source, out, packed.k, weight=packed, **options)

    def _heads(self, attention: Any, window: int | None) -> PackedHeads:
        cos, sin = self._rotation(attention)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        query_norm, key_norm = (each and 1 + each.weight.detach().float() for each in norms)
        return PackedHeads(
            num_heads=self._num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=getattr(attention, "scaling", None) or self.head_dim**-0.5,
            cos=cos,
            sin=sin,
            is_interleaved=False,
            window=window,
            softcap=None,
            sinks=None,
            query_norm=query_norm,
            key_norm=key_norm,
            norms_tokens=False,
            eps=norms[0].eps if norms[0] else 0.0,
        )

    def _rotation(self, attention: Any) -> tuple[Tensor, Tensor]:
        """Tables [positions, head_dim], of each kind of layers once; without elements for learned
        positions."""
        rotate = getattr(self._trunk, "rotary_emb", None)
        if rotate is None:
            return torch.empty(0, 0), torch.empty(0, 0)
        kinds = getattr(self._config, "layer_types", None)
        kind = kinds[attention.layer_idx] if kinds and hasattr(attention, "layer_idx") else None
        if kind not in self._tables:
            places = torch.arange(self._num_positions)[None]
            of_kind = () if kind is None else (kind,)
            cos, sin = (each[0] for each in rotate(torch.empty(0), places, *of_kind))
            sin[:, : self.head_dim // 2].neg_()
            self._tables[kind] = cos.contiguous(), sin.contiguous()
        return self._tables[kind]

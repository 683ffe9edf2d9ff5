"""Recorded passes → programs of the native library: registers get buffers, weights are packed."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kernels.cpu.delta import PackedDelta
from kernels.cpu.operators import (
    Kind,
    Operator,
    PackedColumns,
    PackedExperts,
    PackedHeads,
    PackedLatents,
    PackedMatrix,
    tensors_in,
)
from kernels.cpu.packing import NativeLibrary, gate_up_order
from kernels.cpu.program import Buffer, NativeProgram
from kernels.silu_mul import num_parts
from services.worker.backends.recorder import Instruction, Recording
from services.worker.layers.delta_rule import Columns, DeltaRule
from services.worker.layers.embedding import Embedding, LMHead, TokenRows
from services.worker.layers.experts import Experts, Router, Scores
from services.worker.layers.heads import Heads, LatentExpansion
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.weights import Dense
from services.worker.models.decoder import DecoderLM

OnShare = Callable[[float], None]


class Compiler:
    """Packs each weight of ``model`` once for all passes, and removes it from the model."""

    def __init__(self, model: DecoderLM, library: NativeLibrary) -> None:
        self._library = library
        self._columns = _with_embeddings(model)
        self._packed: dict[nn.Module, PackedMatrix] = {}
        self._halves: dict[nn.Module, tuple[PackedMatrix, PackedMatrix]] = {}
        self._norms: dict[nn.Module, Tensor] = {}
        self._programs: list[NativeProgram] = []

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors of the programs."""
        operators = [program.operators for program in self._programs]
        return list({each.data_ptr(): each for each in tensors_in(operators)}.values())

    def compile(self, recording: Recording, report: OnShare = lambda share: None) -> NativeProgram:
        """``report`` gets the share that is done, 0 … 1."""
        places = _assign(recording)
        operators = []
        for index, each in enumerate(recording.instructions):
            report(index / len(recording.instructions))
            operators.append(self._operator(each, places))
        buffers: dict[int, Buffer] = {}
        for number, place in places.items():
            register = recording.registers[number]
            dtype = torch.float32 if register.is_wide else self._library.dtype
            buffers[place] = Buffer(register.size, dtype)
        program = NativeProgram(
            self._library,
            operators,
            [buffers[place] for place in range(len(buffers))],
            recording.num_inputs,
            places[recording.output],
        )
        self._programs.append(program)
        return program

    def _operator(self, each: Instruction, places: dict[int, int]) -> Operator:
        norm, attention = each.norm, each.heads or each.latents or each.columns or each.index
        place = attention or each.delta
        rows, weight = self._embeddings(each.embedding)
        first, num = each.first, each.num
        if each.embedding is not None:
            first, num = each.embedding.vocab.start, each.embedding.vocab.num
        elif each.marks is not None and each.experts is not None:
            first, num = places[each.marks], 2 if each.experts.of_images else 1
        if each.summed is not None and each.summed.bias is not None:
            rows = each.summed.bias.float()
        has_gates = each.kind == Kind.GATED and num_parts(each.act) == 2
        if each.weight is not None:
            weight = self._pack(each.weight, _bias(each.weight), is_gated=has_gates)
        elif each.gate is not None:
            weight = self._pack_scores(each.gate)
        return Operator(
            kind=each.kind,
            source=places[each.source],
            out=places[each.out],
            second=0 if each.second is None else places[each.second],
            layer=0 if place is None else place.layer,
            group=0 if attention is None else attention.group,
            size=each.size,
            is_wide=each.is_wide,
            adds=each.adds,
            first=first,
            num=num,
            scale=each.scale,
            act=each.act,
            eps=0.0 if norm is None else norm.eps,
            norm=self._norm(norm),
            weight=weight,
            rows=rows,
            heads=None if each.heads is None else self._heads(each.heads),
            order=each.order,
            experts=None if each.experts is None else self._experts(each.experts),
            latents=self._latents(each, places),
            columns=None if each.columns is None else _columns(each.columns),
            delta=None if each.delta is None else _delta(each.delta),
            adapt=each.adapt,
            index=each.index and each.index.packed([places[other] for other in each.others]),
        )

    def _embeddings(self, embedding: Embedding | None) -> tuple[Tensor | None, PackedMatrix | None]:
        """The embedding's rows, or the packed matrix with the rows as its columns."""
        if embedding is None:
            return None, None
        if (columns := self._columns.get(embedding)) is None:
            return embedding.weight.values.data, None
        if columns not in self._packed and columns is not embedding:
            del embedding.weight  # the head has it
        return None, self._pack(columns)

    def _pack(
        self, layer: Linear | TokenRows, bias: Tensor | None = None, *, is_gated: bool = False
    ) -> PackedMatrix:
        if layer not in self._packed:
            order = gate_up_order(layer.outputs // 2) if is_gated else None
            weight = layer.weight
            if isinstance(weight, Dense):
                self._packed[layer] = self._library.pack(weight.values, bias, order)
            else:
                self._packed[layer] = self._library.pack_codes(weight.as_codes, bias, order)
            del layer.weight
        return self._packed[layer]

    def _pack_scores(self, scores: Scores) -> PackedMatrix:
        if scores not in self._packed:
            bias = scores.bias if isinstance(scores, Router) else None
            self._packed[scores] = self._library.pack(scores.weight, bias, dtype=torch.float32)
            del scores.weight
        return self._packed[scores]

    def _experts(self, experts: Experts) -> PackedExperts:
        gate = experts.gate
        gate_up = [each.gate_up_proj for each in experts.products]
        down = [each.down_proj for each in experts.products]
        is_gated = num_parts(experts.act) == 2
        return PackedExperts(
            routing=gate.routing,
            router=self._pack_scores(gate),
            correction=gate.e_score_correction_bias,
            gate_up=[self._pack(each, each.bias, is_gated=is_gated) for each in gate_up],
            down=[self._pack(each, each.bias if each.is_first else None) for each in down],
            act=experts.act,
            first=experts.first,
            counts=experts.counts,
            factors=gate.factors,
        )

    def _norm(self, norm: RMSNorm | None) -> Tensor | None:
        if norm is None:
            return None
        return self._norms.setdefault(norm, norm.weight.float())

    def _heads(self, heads: Heads) -> PackedHeads:
        spec, norm = heads.spec, heads.query_norm
        cos, sin = heads.rotary.table
        return PackedHeads(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            cos=cos,
            sin=sin,
            is_interleaved=spec.is_interleaved,
            window=spec.window,
            softcap=spec.softcap,
            sinks=None if heads.sinks is None else heads.sinks.float(),
            query_norm=self._norm(norm),
            key_norm=self._norm(heads.key_norm),
            norms_tokens=spec.norm == "tokens",
            is_causal=spec.is_causal,
            eps=0.0 if norm is None else norm.eps,
        )

    def _latents(self, each: Instruction, places: dict[int, int]) -> PackedLatents | None:
        if each.latents is None:
            return None
        spec, norm = each.latents.spec, each.latents.norm
        latent, queries, attended = (places[register] for register in each.others)
        keys, values = self._pack_halves(each.latents.expansion)
        cos, sin = each.latents.rotary.table
        return PackedLatents(
            latent=latent,
            queries=queries,
            attended=attended,
            num_heads=spec.num_heads,
            rank=spec.rank,
            nope_dim=spec.nope_dim,
            rope_dim=spec.rope_dim,
            value_dim=spec.value_dim,
            is_interleaved=spec.is_interleaved,
            eps=norm.eps,
            scale=spec.scale,
            norm=norm.weight.float(),
            cos=cos,
            sin=sin,
            keys=keys,
            values=values,
            topk=spec.index_topk,
        )

    def _pack_halves(self, expansion: LatentExpansion) -> tuple[PackedMatrix, PackedMatrix]:
        if expansion not in self._halves:
            keys, values = expansion.halves()
            packed = [self._library.pack(half.flatten(0, 1)) for half in (keys.mT, values)]
            self._halves[expansion] = packed[0], packed[1]
            del expansion.weight
        return self._halves[expansion]


def _columns(columns: Columns) -> PackedColumns:
    """The weight by columns, so that channels are side by side."""
    return PackedColumns(
        num_parts=columns.num_parts,
        part=columns.part,
        width=columns.weight.shape[1],
        weight=columns.weight.T.float().contiguous(),
        bias=None if columns.bias is None else columns.bias.float(),
    )


def _delta(rule: DeltaRule) -> PackedDelta:
    return PackedDelta(
        num_key_heads=rule.num_key_heads,
        key_dim=rule.key_dim,
        conv=rule.conv.T.float().contiguous(),
        rates=rule.decay.float().exp(),
        dt_bias=rule.dt_bias.float(),
        norm=rule.norm.float(),
        eps=rule.eps,
        scan=None if rule.scan is None else rule.scan.in_floats(),
    )


def _with_embeddings(model: DecoderLM) -> dict[Embedding, TokenRows]:
    """The layers with embeddings as packed columns: the output head if it has the same weights,
    else embeddings in codes."""
    tables = [each for each in model.modules() if isinstance(each, Embedding)]
    found: dict[Embedding, TokenRows]
    found = {each: each for each in tables if not isinstance(each.weight, Dense)}
    table, head = model.model.embed_tokens, model.lm_head if model.is_tied else None
    if head is not None and (isinstance(head.weight, Dense) or head.weight is table.weight):
        found[table] = head
    return found


def _bias(layer: Linear | LMHead) -> Tensor | None:
    """The bias that the GEMM adds; for a partial output the sum over ranks adds it."""
    return layer.bias if isinstance(layer, Linear) and not layer.is_partial else None


def _assign(recording: Recording) -> dict[int, int]:
    """The buffer of each register. Registers of one kind share a buffer if their lifetimes do not
    overlap; inputs and output have their own."""
    last = {
        register: index
        for index, each in enumerate(recording.instructions)
        for register in each.registers
    }
    places = dict(zip(range(recording.num_inputs), range(recording.num_inputs), strict=True))
    num_places = len(places)
    own = {*places, recording.output}
    free: dict[tuple[int, bool], list[int]] = {}
    for index, each in enumerate(recording.instructions):
        for register in each.registers:
            if register in places:
                continue
            kind = recording.registers[register].kind
            if register not in own and free.get(kind):
                places[register] = free[kind].pop()
            else:
                places[register] = num_places
                num_places += 1
        for register in {*each.registers} - own:
            if last[register] == index:
                free.setdefault(recording.registers[register].kind, []).append(places[register])
    return places

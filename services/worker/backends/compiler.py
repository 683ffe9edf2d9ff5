"""Recorded passes → programs of the native library: registers get buffers, weights are packed."""

import torch
from torch import Tensor, nn

from kernels.cpu.operators import Kind, Operator, PackedExperts, PackedHeads, PackedMatrix
from kernels.cpu.program import Buffer, NativeLibrary, NativeProgram, gate_up_order
from services.worker.backends.recorder import Instruction, Recording
from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.experts import Experts, Router, Scores
from services.worker.layers.heads import Heads
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.weights import Dense
from services.worker.models.decoder import DecoderLM


class Compiler:
    """Packs each weight of ``model`` once, whatever passes use it, and takes it out of there."""

    def __init__(self, model: DecoderLM, library: NativeLibrary) -> None:
        self._library = library
        self._tied = (model.model.embed_tokens, model.lm_head) if model.is_tied else None
        self._packed: dict[nn.Module, PackedMatrix] = {}
        self._norms: dict[nn.Module, Tensor] = {}
        self._programs: list[NativeProgram] = []

    @property
    def tensors(self) -> list[Tensor]:
        """All that the programs keep."""
        operators = [each for program in self._programs for each in program.operators]
        found = {tensor.data_ptr(): tensor for each in operators for tensor in each.tensors}
        return list(found.values())

    def compile(self, recording: Recording) -> NativeProgram:
        places = _assign(recording)
        operators = [self._operator(each, places) for each in recording.instructions]
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
        norm = each.norm
        rows, weight = self._embeddings(each.embedding)
        if each.weight is not None:
            weight = self._pack(each.weight, is_gated=each.kind == Kind.GATED)
        elif each.gate is not None:
            weight = self._pack_scores(each.gate)
        return Operator(
            kind=each.kind,
            source=places[each.source],
            out=places[each.out],
            second=0 if each.second is None else places[each.second],
            layer=0 if each.heads is None else each.heads.layer,
            size=each.size,
            is_wide=each.is_wide,
            adds=each.adds,
            scale=each.scale,
            eps=0.0 if norm is None else norm.eps,
            norm=self._norm(norm),
            weight=weight,
            rows=rows,
            heads=None if each.heads is None else self._heads(each.heads),
            order=each.order,
            experts=None if each.experts is None else self._experts(each.experts),
        )

    def _embeddings(self, embedding: Embedding | None) -> tuple[Tensor | None, PackedMatrix | None]:
        """The rows, or the head whose columns they are."""
        if embedding is None:
            return None, None
        if self._tied and self._tied[0] is embedding:
            return None, self._pack(self._tied[1])
        return embedding.weight.data, None

    def _pack(self, layer: Linear | LMHead, *, is_gated: bool = False) -> PackedMatrix:
        if layer not in self._packed:
            bias = layer.bias if isinstance(layer, Linear) else None
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
        products, gate = experts.products, experts.gate
        return PackedExperts(
            routing=gate.routing,
            router=self._pack_scores(gate),
            correction=gate.e_score_correction_bias,
            gate_up=[self._pack(each.gate_up_proj, is_gated=True) for each in products],
            down=[self._pack(each.down_proj) for each in products],
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
            query_norm=self._norm(norm),
            key_norm=self._norm(heads.key_norm),
            norms_tokens=spec.norm == "tokens",
            eps=0.0 if norm is None else norm.eps,
        )


def _assign(recording: Recording) -> dict[int, int]:
    """The buffer of each register. Those of one kind share a buffer where their times do not
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

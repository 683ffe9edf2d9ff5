"""A step with prompt chunks; its forward pass is a graph if one has room for it."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.decode_inputs.inputs import DecodeInputs
from kernels.mtp_inputs import note_pairs
from kernels.mtp_inputs.pairs import Pairs
from kernels.paged_attention import DecodeRows
from kernels.sizes import empty_rows
from services.worker.engine.device.chunks import Chunks
from services.worker.engine.device.segments import SampledRows, SamplerOutput, Segments
from services.worker.engine.device.trunk_graphs import RecordedTrunk
from services.worker.layers.context import forward_context
from services.worker.step.sampler import Adjusted


@dataclass(eq=False)
class MixedStep:
    """Decode rows, if any, then prompt chunks. ``decoding`` [B] int32 are the slots of decode rows,
    with ``depths`` [B] int32 drafts and ``width`` tokens each. ``trunk``, a graph of the forward
    pass, has room for all tokens; the rest of the step runs eagerly."""

    segments: Segments
    decoding: Tensor
    depths: Tensor
    width: int
    max_keys: int
    chunks: Chunks
    trunk: RecordedTrunk | None = None
    slots: Tensor = field(init=False)  # [R] int32, of sampling rows
    hidden: Tensor = field(init=False)  # [B * width + T, hidden]
    _inputs: DecodeInputs = field(init=False)
    _logits: Tensor = field(init=False)
    _sampler_output: SamplerOutput = field(init=False)

    def __post_init__(self) -> None:
        self.slots = torch.cat((self.decoding, self.chunks.sampling_slots))

    @property
    def num_decoded(self) -> int:
        """Tokens of decode rows."""
        return len(self.decoding) * self.width

    def forward(self) -> Tensor:
        segments, chunks = self.segments, self.chunks
        self._inputs = segments.inputs(self.decoding, self.depths, self.width)
        if self.trunk is None:
            self.hidden = self._compute(self._inputs)
        else:
            self.hidden = self.trunk.run(self.decoding, self._inputs, chunks)
        ending = chunks.last_tokens[:, None].expand(-1, self.width).flatten()
        sampled = torch.cat((self._decoded(), self.num_decoded + ending))
        if len(sampled):
            self._logits = segments.model.logits(self.hidden[sampled])
        else:
            self._logits = self.hidden.new_zeros(0, 1)
        return self._logits

    def _compute(self, inputs: DecodeInputs) -> Tensor:
        """Hidden states of all tokens."""
        segments, chunks = self.segments, self.chunks
        rows = segments.decode_rows(self.decoding, inputs.starts, self.width)
        slot_mapping = _joined(inputs.slot_mapping, chunks.slot_mapping)
        of_rows = self._if_any(rows), inputs.num_valid, self.max_keys, chunks.rows
        with forward_context(segments.trunk_context(slot_mapping, *of_rows)):
            states: Tensor = segments.model(
                torch.cat((inputs.input_ids, chunks.input_ids)),
                torch.cat((inputs.positions, chunks.positions)),
            )
        return states

    def sample_and_accept(self, adjusted: Adjusted | None) -> SamplerOutput:
        inputs, chunks, width = self._inputs, self.chunks, self.width
        positions = chunks.positions[chunks.last_tokens] + 1
        sampled = SampledRows(
            self.slots,
            torch.cat((inputs.token_slots, chunks.sampling_slots.repeat_interleave(width))),
            torch.cat((inputs.next_positions, positions.repeat_interleave(width))),
            torch.cat((inputs.num_valid, torch.ones_like(chunks.sampling_slots))),
        )
        scores = (self._logits,) if adjusted is None else adjusted
        self._sampler_output = self.segments.sample_and_accept(sampled, self._logits, *scores)
        return self._sampler_output

    def draft(self, depth: int) -> None:
        """If no row samples, only the pairs are computed."""
        pairs, out = self._pair()
        if not len(self.slots):
            return
        chunks, num_tokens = self.chunks, self.segments.state.num_tokens
        last = out[torch.cat((pairs.lasts, self.num_decoded + chunks.last_tokens))]
        ends = num_tokens[chunks.sampling_slots.long()].long()
        targets, counts = torch.cat((pairs.targets, ends)), self._num_emitted()
        self.segments.add_draft(self.slots, last, targets, counts)
        for _ in range(depth - 1):
            self.segments.next_draft(self.slots, last, self.max_keys)

    def _pair(self) -> tuple[Pairs, Tensor]:
        """The pairs of decode rows, and the MTP head's output for the pairs of all tokens of the
        step [B * w + T, hidden]."""
        segments, chunks, num_rows = self.segments, self.chunks, len(self.decoding)
        tokens = self._sampled()
        sampled = tokens[:num_rows], self._num_emitted()[:num_rows]
        pairs = segments.pairs(self.decoding, self._inputs, *sampled)
        note_pairs(segments.state, chunks.slots, chunks.rows.starts + 1, chunks.nums)
        ending = tokens[num_rows:, 0].clamp(min=0).int()
        next_ids = chunks.next_ids.index_copy(0, chunks.last_tokens, ending)
        rows = segments.decode_rows(self.decoding, pairs.starts, self.width, pairs.first_keys)
        of_rows = self._if_any(rows), self.max_keys + 1, chunks.pair_rows(segments.state)
        slot_mapping = _joined(pairs.slot_mapping, chunks.next_slot_mapping)
        with forward_context(segments.context(slot_mapping, *of_rows)):
            out = segments.draft_head.forward(
                segments.draft_head.first_state(self.hidden),
                torch.cat((pairs.input_ids, next_ids)),
                torch.cat((pairs.positions, chunks.positions)),
            )
        return pairs, out

    def _sampled(self) -> Tensor:
        """Tokens [R, w]; R may be 0."""
        if len(self.slots):
            return self._sampler_output.tokens
        return self.chunks.last_tokens.new_zeros(0, self.width)

    def _num_emitted(self) -> Tensor:
        """[R] int32"""
        return self._sampler_output.accepted.num_emitted if len(self.slots) else self.slots

    def _decoded(self) -> Tensor:
        return torch.arange(self.num_decoded, device=self.slots.device)

    def _if_any(self, rows: DecodeRows) -> DecodeRows | None:
        return rows if len(rows.slots) else None


def _joined(decoded: Tensor, chunked: Tensor) -> Tensor:
    """Slot mappings of decode rows [G, B * w] and chunks [G, T] → [G, B * w + T]."""
    num_tokens = decoded.shape[1] + chunked.shape[1]
    out = empty_rows(len(chunked), num_tokens, chunked)
    return torch.cat((decoded, chunked), 1, out=out)

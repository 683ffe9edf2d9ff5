"""The segments of a step, each recorded as a graph: functions of tensors on the device.

forward → logits; judge: sample → accept; draft: the MTP head over the step's tokens → a draft, then
one more draft at a time. No segment blocks the host or allocates permanent memory.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from kernels.accept import accept
from kernels.accept.output import AcceptOutput
from kernels.change_logits import change_logits
from kernels.decode_inputs import decode_inputs
from kernels.decode_inputs.inputs import DecodeInputs
from kernels.linear import FEW_TOKENS
from kernels.logprobs import logprobs_slots
from kernels.mtp_inputs import draft_pairs, step_pairs
from kernels.mtp_inputs.pairs import Pairs
from kernels.paged_attention import ChunkRows, DecodeRows, DeviceAttention
from kernels.sample import NOT_COMPILED, NOT_FINITE
from kernels.sample.slot_rules import Changed
from kernels.sample.slots import process_slots, sample_slots
from kernels.slot_state import SlotState
from kernels.store_drafts import store_drafts
from services.worker.engine.device.states import DeviceStatePool
from services.worker.layers.context import AttentionInputs, ForwardContext, forward_context
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.streams import upload
from services.worker.models import DraftHead, TorchCausalLM
from services.worker.startup.loaded_model import LoadedModel


class ForwardOutput(NamedTuple):
    """Hidden states and logits of B rows of w tokens."""

    inputs: DecodeInputs
    hidden: Tensor  # [B * w, hidden]
    logits: Tensor  # [B * w, V]


class SampledRows(NamedTuple):
    """R rows with up to w tokens each, one after the last known id and one after each draft."""

    slots: Tensor  # [R] int32
    token_slots: Tensor  # [R * w] int32
    positions: Tensor  # [R * w] int64, in the sequence
    num_valid: Tensor  # [R] int32: leading tokens that are valid


class SamplerOutput(NamedTuple):
    """The sampled tokens of R rows with up to w tokens each."""

    tokens: Tensor  # [R, w] int64
    accepted: AcceptOutput
    scores: Tensor  # [R * w, V], for logprobs
    logprobs: tuple[Tensor, Tensor, Tensor]  # of the R * w tokens, see ``logprobs_slots``


@dataclass(frozen=True)
class Segments:
    """``acceptance``: see ``accept``."""

    model: TorchCausalLM
    state: SlotState
    kv_cache: KVCache
    states: DeviceStatePool
    eos_ids: Tensor  # [E] int32
    drafts: bool  # by the model's MTP head
    returns_processed: bool
    acceptance: Tensor | None = None  # [1] float32
    parallel: Parallel = ALONE
    arrivals: Tensor = field(init=False)  # see ``paged_attention.DecodeRows``
    tables: tuple[Tensor, ...] = field(init=False)  # [N, max_blocks] int32, of each group of layers

    def __post_init__(self) -> None:
        num_heads = max(layer.entries.shape[3] for layer in self.kv_cache.layers)
        # Warm-up steps may have more rows than there are slots.
        num_rows = max(len(self.state.is_open), FEW_TOKENS)
        device = self.kv_cache.device
        zeros = torch.zeros(num_rows * num_heads, dtype=torch.int32, device=device)
        object.__setattr__(self, "arrivals", zeros)
        object.__setattr__(self, "tables", self.state.block_tables.unbind())

    @property
    def draft_head(self) -> DraftHead:
        """Only for models with an MTP head."""
        assert self.model.draft_head is not None
        return self.model.draft_head

    @property
    def null_block(self) -> int:
        return self.kv_cache.null_block

    def inputs(self, slots: Tensor, depths: Tensor, width: int) -> DecodeInputs:
        """slots and depths [B] int32 → B rows of ``width`` tokens."""
        size = self.kv_cache.block_size
        return decode_inputs(self.state, slots, depths, width, size, self.null_block)

    def forward(
        self,
        slots: Tensor,
        depths: Tensor,
        width: int,
        max_keys: int,
        logits: Tensor | None = None,
    ) -> ForwardOutput:
        """The forward pass of decode rows with at most ``max_keys`` keys each. It writes its logits
        to ``logits`` [B * width, V], if given."""
        inputs = self.inputs(slots, depths, width)
        rows = self.decode_rows(slots, inputs.starts, width)
        of_rows = rows, inputs.num_valid, max_keys
        with forward_context(self.trunk_context(inputs.slot_mapping, *of_rows)):
            hidden: Tensor = self.model(inputs.input_ids, inputs.positions)
        return ForwardOutput(inputs, hidden, self.model.logits(hidden, logits))

    def sample_and_accept(
        self,
        sampled: SampledRows,
        logits: Tensor,
        adjusted: Tensor,
        waiting: np.ndarray | None = None,
    ) -> SamplerOutput:
        """logits and adjusted [R * w, V] float32. Rows in ``waiting`` [W] int64 get NOT_COMPILED in
        place of a token."""
        _, token_slots, positions, num_valid = sampled
        sampling, changed = self.state.sampling, self._changed(adjusted, token_slots, positions)
        tokens = sample_slots(logits, adjusted, sampling, token_slots, positions, changed)
        scores = logits
        if self.returns_processed:
            scores = process_slots(adjusted, sampling, token_slots, changed)
        logprobs = logprobs_slots(scores, tokens, self.state.num_logprobs, token_slots)
        if waiting is not None:
            rows = upload(waiting, tokens.device)
            tokens[rows] = tokens[rows].masked_fill(tokens[rows] != NOT_FINITE, NOT_COMPILED)
        tokens = self.parallel.first(tokens)
        tokens = tokens.view(len(num_valid), -1)
        ends = self.eos_ids, self.acceptance
        accepted = accept(self.state, sampled.slots, num_valid, tokens, *ends)
        return SamplerOutput(tokens, accepted, scores, logprobs)

    def first_draft(
        self,
        slots: Tensor,
        inputs: DecodeInputs,
        hidden: Tensor,
        sampler_output: SamplerOutput,
        max_keys: int,
        into: Tensor | None = None,
    ) -> Tensor:
        """Runs the MTP head on the pairs of all tokens of decode rows and adds a draft to each row.
        Returns its output for the last pair of each row [B, hidden], in ``into`` if given."""
        tokens, num_emitted = sampler_output.tokens, sampler_output.accepted.num_emitted
        pairs = self.pairs(slots, inputs, tokens, num_emitted)
        state = self.draft_head.first_state(hidden)
        out = self._mtp(slots, state, pairs, tokens.shape[1], max_keys)
        last = torch.index_select(out, 0, pairs.lasts, out=into)
        self.add_draft(slots, last, pairs.targets, pairs.counts)
        return last

    def pairs(
        self, slots: Tensor, inputs: DecodeInputs, tokens: Tensor, num_emitted: Tensor
    ) -> Pairs:
        """The pairs of decode rows; ``tokens`` [B, w] were sampled, and the first ``num_emitted``
        [B] int32 of them emitted."""
        size = self.kv_cache.block_size
        rows = self.state, slots, inputs.starts, inputs.num_valid, tokens, num_emitted
        return step_pairs(*rows, size, self.null_block)

    def next_draft(self, slots: Tensor, out: Tensor, max_keys: int) -> None:
        """Adds a draft to each of ``slots`` [R] int32 that has one. ``out`` [R, hidden], the MTP
        head's output for the last pair, is overwritten with that for the new pair."""
        pairs = draft_pairs(self.state, slots, self.kv_cache.block_size, self.null_block)
        out.copy_(self._mtp(slots, out, pairs, 1, max_keys))
        self.add_draft(slots, out, pairs.targets, pairs.counts)

    def add_draft(self, slots: Tensor, out: Tensor, targets: Tensor, counts: Tensor) -> None:
        """Samples a draft at the positions ``targets`` [R] int64 for each of ``slots`` [R] int32
        with a positive count in ``counts`` [R] int32."""
        state = self.state
        computed, logits = self.draft_head.logits(out)
        changed = self._changed(logits, slots, targets)
        tokens = sample_slots(computed, logits, state.sampling, slots, targets, changed)
        values, _, ranks = logprobs_slots(logits, tokens, state.wants_draft_logprobs, slots)
        store_drafts(state, slots, counts, tokens, values[:, 0], ranks)

    def _changed(self, logits: Tensor, slots: Tensor, positions: Tensor) -> Changed:
        """Applies the device's rules of ``slots`` [S] int32 to the logits."""
        state = self.state
        changed = change_logits(logits, state, slots, positions)
        return Changed(changed, state.rules.is_changed)

    def decode_rows(
        self, slots: Tensor, starts: Tensor, width: int, first_keys: Tensor | None = None
    ) -> DecodeRows:
        return DecodeRows(width, slots, starts, self.arrivals, first_keys)

    def context(
        self,
        slot_mapping: Tensor,
        decode: DecodeRows | None,
        max_keys: int,
        chunks: ChunkRows | None = None,
    ) -> ForwardContext:
        """The context of T tokens; slot_mapping [G, T] int64."""
        rows = decode, chunks, self.kv_cache.block_size, max_keys
        groups = [
            AttentionInputs(of_group, DeviceAttention(tables, *rows))
            for of_group, tables in zip(slot_mapping.unbind(), self.tables, strict=True)
        ]
        return ForwardContext(self.kv_cache.layers, groups)

    def trunk_context(
        self,
        slot_mapping: Tensor,
        decode: DecodeRows | None,
        num_valid: Tensor,
        max_keys: int,
        chunks: ChunkRows | None = None,
    ) -> ForwardContext:
        """With the states of the rows; ``num_valid`` [B] int32 are the tokens of decode rows."""
        context = self.context(slot_mapping, decode, max_keys, chunks)
        states = self.states.of_step(decode, num_valid, chunks, slot_mapping.shape[1])
        return replace(context, states=states)

    def _mtp(
        self, slots: Tensor, states: Tensor, pairs: Pairs, width: int, max_keys: int
    ) -> Tensor:
        rows = self.decode_rows(slots, pairs.starts, width, pairs.first_keys)
        most = max_keys + self.state.max_drafts
        with forward_context(self.context(pairs.slot_mapping, rows, most)):
            return self.draft_head.forward(states, pairs.input_ids, pairs.positions)


def make_segments(
    loaded: LoadedModel, state: SlotState, num_blocks: int, states: DeviceStatePool
) -> Segments:
    """Makes segments with a KV cache of ``num_blocks`` blocks."""
    share = loaded.settings.draft_acceptance
    return Segments(
        model=cast(TorchCausalLM, loaded.model),
        state=state,
        kv_cache=loaded.make_kv_cache(num_blocks),
        states=states,
        eos_ids=torch.from_numpy(loaded.eos_ids).int().to(loaded.device),
        drafts=loaded.speculation.method == "mtp",
        returns_processed=loaded.returns_processed,
        acceptance=None if share is None else torch.tensor([share], device=loaded.device),
        parallel=loaded.parallel,
    )


def make_trial_segments(loaded: LoadedModel, state: SlotState) -> Segments:
    """For steps whose results no one reads: with no block but the null block, and one state."""
    specs = loaded.shape.state_specs
    states = DeviceStatePool(specs, loaded.limits, loaded.device, is_trial=True)
    return make_segments(loaded, state, 0, states)

"""The number of KV blocks that fit: memory less other users, weights and a step's peak."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from msgspec import structs

from kernels.paged_attention.batch import MAX_GATHERED_TOKENS
from kernels.paged_attention.grouped import MAX_SCORES
from kernels.sample.slot_rules import no_rules
from services.worker.layers.embedding import Embedding
from services.worker.layers.weights import Quantized
from services.worker.machine.hardware import Memory
from services.worker.metrics import show_memory
from services.worker.models import CausalLM, TorchCausalLM
from services.worker.startup.loaded_model import LoadedModel
from services.worker.step.logprobs import MAX_LOGITS_AT_ONCE
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.kv_groups import has_windows, most_blocks, tokens_that_fit
from shared.wire.messages import MAX_BLOCKS, WINDOW_BYTES, Capacity

log = logging.getLogger(__name__)

CPU_MAX_KV_BYTES = 4 << 30
MAX_COPIES = 4  # of the states of each sequence
SHORT = 4096  # tokens of a request for which the log says what fits
# For each entry of the logits: scores, their filtered copies and indices, and the ids that requests
# allow. Logprobs come after these are freed and take less: rows are processed in pieces.
SAMPLER_BYTES = 64
# For each logit of a piece: itself, its logprob, and both sorted with their ids.
LOGPROB_BYTES = 32
# For each score that torch's operators compute separately: before and after cap and mask, and its
# weight.
SCORE_BYTES = 16


@dataclass(frozen=True)
class MemoryRequirements:
    """Bytes that the model takes on its device. ``capacity`` has the limits that the peak is for,
    and no blocks yet."""

    weights: int
    peak: int
    block: int
    capacity: Capacity
    graphs: int | None = None  # None: the peak was estimated, and there are no graphs
    slack: int = 0  # for bytes that the measurement of the peak may have missed
    state: int = 0  # of a sequence, in all layers with a state
    drafts: int = 0  # of a sequence, kept for its state
    added: Mapping[str, int] = field(default_factory=dict)  # by optional parts, by purpose

    @property
    def total(self) -> int:
        """Without the KV cache and states."""
        return self.weights + self.peak + (self.graphs or 0) + self.slack + sum(self.added.values())

    @property
    def blocks_per_request(self) -> int:
        return most_blocks(self.capacity, self.capacity.max_model_len)


@dataclass(frozen=True)
class MemoryReport:
    """The blocks of the KV cache, and how we came by their number. A model with states has room for
    ``num_seqs`` sequences and ``num_states`` copies."""

    num_blocks: int
    num_seqs: int
    num_states: int | None
    budget: int
    others: int
    requirements: MemoryRequirements
    num_ranks: int = 1  # of the worker, each with the same memory

    @property
    def kv_cache(self) -> int:
        """Bytes of all blocks."""
        return self.num_blocks * self.requirements.block

    @property
    def states(self) -> int:
        """Bytes of the states of all sequences, of their copies and of kept drafts."""
        needs = self.requirements
        return self.num_seqs * (needs.state + needs.drafts) + (self.num_states or 0) * needs.state

    def publish(self) -> None:
        for line in self.lines():
            log.info(line)
        requirements = self.requirements
        show_memory(requirements.weights, self.kv_cache, requirements.peak, self.num_ranks)

    def lines(self) -> list[str]:
        """The lines of the start-up log, one per item."""
        requirements, capacity = self.requirements, self.capacity
        longest = capacity.max_model_len
        concurrency = tokens_that_fit(capacity, longest) / longest
        return [
            f"memory: {mib(self.budget)} may be used, {mib(self.others)} are used by others",
            f"weights: {mib(requirements.weights)} in memory{self._each}",
            *self._peak_lines(),
            *(f"{what}: {mib(each)}" for what, each in requirements.added.items()),
            *self._state_lines(),
            f"KV cache: {self.num_blocks} blocks of {capacity.block_size} tokens"
            f" = {self._tokens} ({mib(self.kv_cache)}{self._each})",
            f"maximum concurrency for {longest} tokens per request: {concurrency:.2f}×",
        ]

    @property
    def capacity(self) -> Capacity:
        return structs.replace(
            self.requirements.capacity,
            num_blocks=self.num_blocks,
            max_num_seqs=self.num_seqs,
            num_states=self.num_states,
        )

    def _state_lines(self) -> list[str]:
        if self.num_states is None:
            return []
        needs, num_seqs = self.requirements, self.num_seqs
        lines = [
            f"states: {num_seqs} of sequences, {self.num_states} copies of {mib(needs.state)}"
            f" ({mib(self.states)}{self._each})"
        ]
        if num_seqs < needs.capacity.max_num_seqs:
            lines.append(
                f"max-num-seqs: {num_seqs} instead of {needs.capacity.max_num_seqs}, since states"
                " take half of the cache's memory (kv-cache-memory-bytes, gpu-memory-utilization)"
            )
        return lines

    @property
    def _tokens(self) -> str:
        """With windows short requests take more of the cache for a token than long ones."""
        capacity = self.capacity
        longest = capacity.max_model_len
        if not has_windows(capacity):
            return f"{tokens_that_fit(capacity, longest)} tokens"
        lengths = dict.fromkeys((longest, min(SHORT, longest)))
        return ", ".join(
            f"{tokens_that_fit(capacity, length)} tokens in requests of {length}"
            for length in lengths
        )

    @property
    def _each(self) -> str:
        return f" of each of {self.num_ranks} ranks" if self.num_ranks > 1 else ""

    def _peak_lines(self) -> list[str]:
        peak, graphs = self.requirements.peak, self.requirements.graphs
        if graphs is None:
            return [f"peak of a step: {mib(peak)} (estimated)"]
        return [
            f"peak of a step, slots and kernels: {mib(peak)} (measured)",
            f"CUDA graphs: {mib(graphs)} (expected)",
            f"slack: {mib(self.requirements.slack)}, for libraries and fragments that come later",
        ]


def estimate_requirements(loaded: LoadedModel) -> MemoryRequirements:
    """Measures the weights in memory, and estimates a step's tensors from above."""
    shape, vocab_size = loaded.shape, loaded.num_outputs
    max_tokens, max_len = loaded.max_num_batched_tokens, loaded.model_info.max_model_len
    num_tokens = max_tokens + loaded.max_num_seqs * (loaded.speculation.method == "mtp")
    activations = num_tokens * shape.numbers_per_token * torch.float32.itemsize
    gathered = max(MAX_GATHERED_TOKENS, max_len) * _gathered_bytes(loaded)
    masks = max_tokens * max_len * (loaded.dtype.itemsize + 1)
    widened = _widest_codes(loaded.model) * (torch.float32.itemsize + loaded.dtype.itemsize)
    num_sampled = min((1 + loaded.speculation.num_drafts) * loaded.max_num_seqs, max_tokens)
    logits = num_sampled * vocab_size * SAMPLER_BYTES
    prompts = prompt_logprob_bytes(loaded.max_num_seqs, max_tokens, vocab_size)
    attention = gathered + masks + _score_bytes(loaded)
    return requirements_with(loaded, activations + attention + widened + max(logits, prompts))


def _gathered_bytes(loaded: LoadedModel) -> int:
    """The bytes of a token's entry in attention's copy. Torch's operators convert codes to float32
    and to the model's dtype."""
    is_torch = isinstance(loaded.model, TorchCausalLM)
    widened = torch.float32.itemsize + loaded.dtype.itemsize
    return max(
        each.num_bytes + math.prod(each.entry) * widened * (is_torch and each.codes is not None)
        for each in loaded.shape.kv_layouts
    )


def _score_bytes(loaded: LoadedModel) -> int:
    """The scores that exist at once: the scores of one token."""
    num_heads = loaded.shape.num_scored_heads
    if not num_heads or not isinstance(loaded.model, TorchCausalLM):
        return 0
    longest = max(MAX_GATHERED_TOKENS, loaded.model_info.max_model_len)
    return max(MAX_SCORES, num_heads * longest) * SCORE_BYTES


def _widest_codes(model: CausalLM) -> int:
    """The numbers of the largest weight of a quantized GEMM by torch's operators, which dequantize
    it in each step; those of an embedding are dequantized row by row."""
    parts = [each for each in model.modules() if not isinstance(each, Embedding | Quantized)]
    forms: list[Any] = [getattr(each, "weight", each) for each in parts]  # stacks have none
    codes = [each.as_codes for each in forms if hasattr(each, "as_codes")]
    return max((math.prod(each.shape[-2:]) for each in codes), default=0)


def requirements_with(
    loaded: LoadedModel, peak: int, graphs: int | None = None, slack: int = 0
) -> MemoryRequirements:
    """With ``peak``, the memory of a step apart from weights and KV cache."""
    shape, limits = loaded.shape, loaded.limits
    of_draft = sum(each.draft_bytes for each in shape.state_specs)
    added: dict[str, int] = {}
    for addition in loaded.additions:
        added |= addition.num_bytes(loaded.max_num_batched_tokens)
    return MemoryRequirements(
        weights=weight_bytes(loaded.model),
        peak=peak,
        block=loaded.settings.block_size * shape.token_bytes,
        capacity=limits,
        graphs=graphs,
        slack=slack,
        state=sum(each.num_bytes for each in shape.state_specs),
        drafts=limits.num_speculative_tokens * of_draft,
        added=added,
    )


def weight_bytes(model: CausalLM) -> int:
    """The bytes on the device: for offloaded layers the buffers that they share."""
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    offloaded = model.offloaded
    if offloaded is None:
        return num_bytes
    return num_bytes - offloaded.weight_bytes + offloaded.buffer_bytes


def prompt_logprob_bytes(max_num_seqs: int, max_num_tokens: int, vocab_size: int) -> int:
    """The memory for the logprobs of prompts, next to the logprobs of a step's other tokens: the
    logits of a piece, and all logprobs, which credit bounds, until they are joined."""
    num_logits = min(max(MAX_LOGITS_AT_ONCE, vocab_size), max_num_tokens * vocab_size)
    sampled_bytes = 2 * max_num_seqs * vocab_size * torch.float32.itemsize
    prompt_bytes = min(
        max_num_tokens * vocab_size * torch.float32.itemsize, max_num_seqs * WINDOW_BYTES
    )
    return num_logits * LOGPROB_BYTES + sampled_bytes + 2 * prompt_bytes


def rule_bytes(num_slots: int, vocab_size: int) -> int:
    """The memory of the requests' logits rules on a GPU, the null slot's included."""
    tables = no_rules(num_slots + 1, vocab_size, torch.device("meta"))
    return sum(each.nbytes for each in tables)


def plan_worker(loaded: LoadedModel, requirements: MemoryRequirements) -> MemoryReport:
    """Plans with the other ranks: each has as many blocks as the rank with the least memory. Raises
    ConfigError on all of them if a request does not fit on one."""
    ranks = loaded.ranks
    try:
        report = plan_memory(loaded.settings, requirements, loaded.before, loaded.device)
    except ConfigError:
        ranks.least(0)
        raise
    num_blocks = ranks.least(report.num_blocks)
    if not num_blocks:
        raise ConfigError("max-model-len: one request does not fit on another rank, which says why")
    if report.num_states is not None:
        num_seqs, num_states = ranks.least(report.num_seqs), ranks.least(report.num_states)
        report = replace(report, num_seqs=num_seqs, num_states=num_states)
    return replace(report, num_blocks=num_blocks, num_ranks=ranks.size)


def plan_memory(
    settings: WorkerConfig, requirements: MemoryRequirements, before: Memory, device: torch.device
) -> MemoryReport:
    """``before`` is the memory before the weights were loaded.

    Raises ConfigError if one request of ``max_model_len`` does not fit.
    """
    budget = int(before.total * settings.gpu_memory_utilization)
    others = before.total - before.free
    room = _room(settings, budget - others - requirements.total, device)
    num_seqs, num_states = _count_states(requirements, room)
    room -= num_seqs * (requirements.state + requirements.drafts)
    room = max(0, room - (num_states or 0) * requirements.state)
    num_wanted = min(num_seqs * requirements.blocks_per_request, MAX_BLOCKS)
    num_blocks = min(room // max(1, requirements.block), num_wanted)  # an encoder's has 0 bytes
    num_blocks = settings.num_gpu_blocks_override or num_blocks
    report = MemoryReport(num_blocks, num_seqs, num_states, budget, others, requirements)
    if num_blocks < requirements.blocks_per_request:
        raise ConfigError(_too_little(settings, requirements, room, report))
    return report


def _count_states(requirements: MemoryRequirements, room: int) -> tuple[int, int | None]:
    """Counts the sequences and the copies of states, in half of the ``room`` for the cache: one
    copy for each sequence at least, and up to ``MAX_COPIES``."""
    num_seqs, state = requirements.capacity.max_num_seqs, requirements.state
    if not state:
        return num_seqs, None
    room //= 2
    num_seqs = max(1, min(num_seqs, room // (2 * state + requirements.drafts)))
    left = room - num_seqs * (state + requirements.drafts)
    return num_seqs, max(1, min(left // state, MAX_COPIES * num_seqs))


def _room(settings: WorkerConfig, left: int, device: torch.device) -> int:
    """Bytes that the KV cache may take."""
    if settings.kv_cache_memory_bytes is not None:
        return settings.kv_cache_memory_bytes
    return max(0, min(left, CPU_MAX_KV_BYTES) if device.type == "cpu" else left)


def _too_little(
    settings: WorkerConfig, requirements: MemoryRequirements, room: int, report: MemoryReport
) -> str:
    wanted, capacity = requirements.blocks_per_request * requirements.block, requirements.capacity
    if settings.num_gpu_blocks_override is not None:
        return (
            f"num-gpu-blocks-override: {settings.num_gpu_blocks_override} blocks of"
            f" {capacity.block_size} tokens; one request of max-model-len ="
            f" {capacity.max_model_len} tokens takes {requirements.blocks_per_request}: raise"
            " the one or lower the other"
        )
    if settings.kv_cache_memory_bytes is not None:
        remedy = "raise kv-cache-memory-bytes or lower max-model-len"
    else:
        remedy = (
            "lower max-model-len, max-num-batched-tokens or max-num-seqs, or raise"
            f" gpu-memory-utilization ({settings.gpu_memory_utilization})"
        )
    return (
        f"max-model-len: the KV cache of one request of {capacity.max_model_len} tokens takes"
        f" {mib(wanted)} and {mib(room)} are left for it; {remedy}. "
        + "; ".join(report.lines()[:-2])
    )


def mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"

"""The engine: one step after another, from a plan to the tokens it brought. No sockets."""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from kernels.sample import adjust
from services.worker.batch import Batch, prepare_batch
from services.worker.context import forward_context
from services.worker.drafters import StepDone
from services.worker.dummy_weights import make_dummy
from services.worker.hardware import choose_device, choose_dtype, read_memory
from services.worker.kernel_choice import choose_kernels
from services.worker.kv_cache import KVCache
from services.worker.loader import load_model
from services.worker.logprobs import tell_logprobs
from services.worker.memory import measure_needs, num_kv_layers, plan_memory
from services.worker.metrics import show_memory
from services.worker.model_config import read_eos_ids, read_model_config
from services.worker.progress import Progress
from services.worker.prompt_logprobs import tell_prompts
from services.worker.registry import check_architecture
from services.worker.results import record, tell_drafts, with_parts
from services.worker.slots import SlotTable
from services.worker.speculation import choose_speculation, make_drafter
from services.worker.verify import verify
from shared.config import WorkerConfig
from shared.messages import Capacity, ResultRow, StepPlan, StepResult
from shared.model_folder import read_model_info
from shared.model_location import locate_model
from shared.token_arrays import TokenArrays

log = logging.getLogger(__name__)

DEFAULT_BATCHED_TOKENS = {"cpu": 512, "cuda": 8192}


class Engine:
    """A model with its KV cache and the slots of its sequences.

    ``progress`` is told what loading does and how far it is, 0 … 1. Raises ConfigError where model,
    machine and settings do not go together. A plan that breaks the contract raises ValueError.
    """

    def __init__(self, settings: WorkerConfig, progress: Progress) -> None:
        location = locate_model(settings.model)
        check_architecture(location.folder)
        self.model_info = read_model_info(location.folder, [], settings.max_model_len)
        config = read_model_config(location.folder)
        device = choose_device(settings.device, settings.gpu_claims)
        dtype = choose_dtype(settings.dtype, device)
        names = location.name, "/".join(config.architectures)
        log.info("model %s (%s) in %s on %s", *names, dtype, device)
        before = read_memory(device)
        if settings.load_format == "dummy":
            self._model = make_dummy(config, dtype, device)
        else:
            self._model = load_model(location.folder, config, dtype, device, progress)
        self._model, self._sampler = choose_kernels(self._model, config, settings, dtype, device)
        max_tokens = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS[device.type]
        max_len = self.model_info.max_model_len
        wanted = settings.speculative_config
        self._speculation = choose_speculation(wanted, self._model)
        needs = measure_needs(
            self._model, config, dtype, settings, max_tokens, max_len, self._speculation
        )
        report = plan_memory(settings, needs, before, device)
        for line in report.lines():
            log.info(line)
        show_memory(needs.weights, report.kv_cache, needs.peak)
        self.capacity = Capacity(
            report.num_blocks,
            settings.block_size,
            min(settings.max_num_seqs, max_tokens),  # each may want a token in every step
            max_tokens,
            max_len,
            self.model_info.vocab_size,
            self._speculation.num_drafts,
            self._speculation.adapts,
        )
        self._eos_ids = np.array(read_eos_ids(location.folder, config), np.int64)
        self._tells_processed = settings.logprobs_mode == "processed_logprobs"
        self._slots = SlotTable(self.capacity)
        num_layers = num_kv_layers(config, self._speculation)
        self._kv_cache = KVCache(
            config, num_layers, report.num_blocks, settings.block_size, dtype, device
        )
        self._drafter = make_drafter(
            *(self._speculation, wanted, self._model, self._sampler),
            *(self._kv_cache, self._eos_ids, self.capacity),
        )
        self._undrafted: StepDone | None = None
        self._draft_s = 0.0

    @property
    def num_running(self) -> int:
        """Sequences that are admitted and have not ended."""
        return int(self._slots.is_open.sum())

    def reset(self) -> None:
        """Forgets every sequence: their scheduler is gone."""
        self._slots.is_open[:] = False
        self._undrafted = None
        self._draft_s = 0.0

    @torch.inference_mode()
    def step(self, plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
        """Runs ``plan``; ``ids`` [sum of num_ids] int32 are the known ids of the admitted rows.

        Returns the rows that emitted or ended, and what they emitted. What the step took includes
        the drafts that it verified.
        """
        self.draft()
        started_s = time.perf_counter() - self._draft_s
        self._draft_s = 0.0
        fresh_blocks = self._slots.apply(plan, ids)
        if self._model.clears_blocks:
            self._kv_cache.clear(fresh_blocks)
        self._drafter.begin(self._slots, plan, fresh_blocks)
        repeats_states = self._drafter.repeats_states and plan.draft_depth > 0
        batch = prepare_batch(self._slots, plan, self._kv_cache, self._eos_ids, repeats_states)
        rows, arrays = (
            self._run(batch, plan.draft_depth) if len(batch.slots) else ([], TokenArrays())
        )
        return StepResult(plan.step, rows, time.perf_counter() - started_s), arrays

    @torch.inference_mode()
    def draft(self) -> None:
        """Makes the drafts for the next step, unless it has: to be called when the result of the
        last one is on its way."""
        if self._undrafted is None:
            return
        started_s = time.perf_counter()
        self._drafter.draft(self._slots, self._undrafted)
        self._undrafted = None
        self._draft_s = time.perf_counter() - started_s

    def _run(self, batch: Batch, draft_depth: int) -> tuple[list[ResultRow], TokenArrays]:
        table, sampler = self._slots, self._sampler
        hidden = self._forward(batch)
        logits = self._model.logits(hidden.index_select(0, batch.sampling_tokens))
        slots, adjustments, random = batch.sampled
        adjusted = logits if adjustments is None else adjust(logits, adjustments)
        verdict = verify(table, batch, sampler.sample(logits, adjusted, random), self._eos_ids)
        told_of = sampler.process(adjusted, random) if self._tells_processed else logits
        told = tell_logprobs(table, slots, verdict, told_of, sampler)
        drafts = tell_drafts(table, batch, verdict)
        rows, emitted = record(table, batch, verdict, told)
        if self._model.clears_blocks and verdict.is_retried.any():
            self._kv_cache.clear_places(batch.places_of(verdict.is_retried))
        vocab_size = self.model_info.vocab_size
        prompts = tell_prompts(table, batch, hidden, self._model.logits, vocab_size, sampler)
        go_on = batch.sampling_slots[~verdict.has_ended & (verdict.num_emitted > 0)]
        depth = min(draft_depth, self._speculation.num_drafts)
        self._undrafted = StepDone(batch, hidden, go_on, depth)
        arrays = TokenArrays(emitted, *told.arrays())
        return with_parts(table, rows, arrays, prompts + drafts)

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden_size] of all tokens."""
        with forward_context(batch.context):
            hidden: Tensor = self._model(batch.input_ids, batch.positions)
        return hidden

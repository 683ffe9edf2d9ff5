"""The engine: one step after another, from a plan to the tokens it brought. No sockets."""

import logging
import time

import numpy as np
import torch
from torch import Tensor

from kernels.sample import adjust
from services.worker.batch import Batch, prepare_batch
from services.worker.context import forward_context
from services.worker.dummy_weights import make_dummy
from services.worker.hardware import choose_device, choose_dtype, read_memory
from services.worker.kernel_choice import choose_kernels
from services.worker.kv_cache import KVCache
from services.worker.loader import load_model
from services.worker.logprobs import tell_logprobs
from services.worker.memory import measure_needs, plan_memory
from services.worker.metrics import show_memory
from services.worker.model_config import read_eos_ids, read_model_config
from services.worker.progress import Progress
from services.worker.prompt_logprobs import tell_prompts, with_prompts
from services.worker.registry import check_architecture
from services.worker.results import record
from services.worker.slots import SlotTable
from shared.config import WorkerConfig
from shared.messages import Capacity, StepPlan, StepResult
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
        needs = measure_needs(self._model, config, dtype, settings, max_tokens, max_len)
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
        )
        self._eos_ids = np.array(read_eos_ids(location.folder, config), np.int64)
        self._tells_processed = settings.logprobs_mode == "processed_logprobs"
        self._slots = SlotTable(self.capacity)
        self._kv_cache = KVCache(config, report.num_blocks, settings.block_size, dtype, device)

    @property
    def num_running(self) -> int:
        """Sequences that are admitted and have not ended."""
        return int(self._slots.is_open.sum())

    def reset(self) -> None:
        """Forgets every sequence: their scheduler is gone."""
        self._slots.is_open[:] = False

    @torch.inference_mode()
    def step(self, plan: StepPlan, ids: np.ndarray) -> tuple[StepResult, TokenArrays]:
        """Runs ``plan``; ``ids`` [sum of num_ids] int32 are the known ids of the admitted rows.

        Returns the rows that emitted or ended, and what they emitted.
        """
        started_s = time.perf_counter()
        fresh_blocks = self._slots.apply(plan, ids)
        if self._model.clears_blocks:
            self._kv_cache.clear(fresh_blocks)
        batch = prepare_batch(self._slots, plan, self._kv_cache, self._eos_ids)
        if not len(batch.slots):  # all of them have ended since the plan was made
            return StepResult(plan.step, [], time.perf_counter() - started_s), TokenArrays()
        hidden = self._forward(batch)
        logits = self._model.logits(hidden.index_select(0, batch.sampling_tokens))
        adjusted = logits if batch.adjustments is None else adjust(logits, batch.adjustments)
        tokens = self._sampler.sample(logits, adjusted, batch.random)
        told_of = self._sampler.process(adjusted, batch.random) if self._tells_processed else logits
        told = tell_logprobs(self._slots, batch.sampling_slots, told_of, tokens, self._sampler)
        rows, emitted = record(self._slots, batch, tokens, told, self._eos_ids)
        vocab_size = self.model_info.vocab_size
        prompts = tell_prompts(
            self._slots, batch, hidden, self._model.logits, vocab_size, self._sampler
        )
        arrays = TokenArrays(emitted, *told.arrays())
        rows, arrays = with_prompts(self._slots, rows, arrays, prompts)
        return StepResult(plan.step, rows, time.perf_counter() - started_s), arrays

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden_size] of all tokens."""
        with forward_context(batch.context):
            hidden: Tensor = self._model(batch.input_ids, batch.positions)
        return hidden

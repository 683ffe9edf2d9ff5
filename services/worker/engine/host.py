"""The engine on a CPU: runs one step after another, from a plan to its result. No sockets.

A plan may ask for several steps; each begins with the tokens sampled in the step before.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from kernels.sample import NOT_COMPILED, NOT_FINITE
from services.worker.engine.plain_steps import PlainSteps
from services.worker.engine.protocol import StepOutput
from services.worker.layers.context import forward_context
from services.worker.machine.state_pool import StatePool
from services.worker.machine.streams import Fetched, OnHost
from services.worker.metrics import EXPERT_LOADS
from services.worker.slots.table import SlotTable
from services.worker.speculation.choose import make_drafter
from services.worker.speculation.drafter import RecordedStep, agree_on_drafts
from services.worker.startup.choose_backend import choose_kernels
from services.worker.startup.loaded_model import LoadedModel, load
from services.worker.startup.plan_memory import estimate_requirements, plan_worker
from services.worker.step.batch import Batch, prepare_batch
from services.worker.step.parts import make_parts
from services.worker.step.results import StepRows, join_steps
from services.worker.step.sampler import Adjusted
from services.worker.step.sampling import Rules, random_rows_of
from services.worker.step.step import Backend, Places, Sampled, Step, StepRunner
from services.worker.step.verify import verify
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import StepPlan, StepResult


@dataclass(eq=False)
class HostComputation:
    """A step of ``batch``; ``compute`` returns its hidden states [T, hidden_size]."""

    loaded: LoadedModel
    table: SlotTable
    compute: Callable[[Batch], Tensor]
    batch: Batch
    hidden: Tensor = field(init=False)
    logits: Tensor = field(init=False)

    def forward(self) -> Tensor:
        self.hidden = self.compute(self.batch)
        sampling = self.hidden.index_select(0, self.batch.sampling_tokens)
        self.logits = self.loaded.model.logits_of(self.batch.logits_slots, sampling)
        return self.logits

    def places(self) -> Places:
        slots, positions = self.batch.logits_slots, self.batch.logits_positions
        return Places(np.arange(len(slots)), slots, positions)

    def sample(self, adjusted: Adjusted | None) -> Sampled:
        loaded, batch, logits = self.loaded, self.batch, self.logits
        places = batch.logits_slots, batch.logits_positions, logits.device
        random = random_rows_of(self.table, *places)
        allowed = logits if adjusted is None else adjusted.logits
        tokens = loaded.sampler.sample(logits, allowed, random)
        if adjusted is not None:
            waiting = adjusted.waiting
            tokens[waiting[tokens[waiting] != NOT_FINITE]] = NOT_COMPILED
        found = loaded.parallel.first(torch.from_numpy(tokens))
        outcome = verify(self.table, batch.rows, found.numpy(), loaded.eos_ids)
        if loaded.returns_processed:
            logits = loaded.sampler.process(allowed, random)
        return Sampled(found, logits, outcome)

    def chunk_states(self) -> Tensor:
        return self.hidden


class HostEngine:
    """A model with its KV cache and slots.

    ``progress`` gets the activity of loading and its completed share, 0 … 1. Raises ConfigError if
    model, machine and settings do not fit together. An invalid plan raises ValueError.
    """

    max_num_steps = 16  # of a plan

    def __init__(self, settings: WorkerConfig, progress: Progress) -> None:
        if settings.draft_acceptance is not None:
            raise ConfigError("draft-acceptance: supported on GPUs only")
        if settings.cpu_offload_gb:
            raise ConfigError(
                f"cpu-offload-gb: {settings.cpu_offload_gb:g}: supported on GPUs only; a worker on"
                " a CPU has all weights in host memory"
            )
        loaded = load(settings, progress, partial(choose_kernels, progress=progress))
        self.additions = loaded.additions
        report = plan_worker(loaded, estimate_requirements(loaded))
        report.publish()
        self.model_info = loaded.model_info
        self.capacity = structs.replace(report.capacity, max_num_steps=self.max_num_steps)
        self._model, self._pooler = loaded.model, loaded.pooler
        self._speculation, self._eos_ids = loaded.speculation, loaded.eos_ids
        self._parallel = loaded.parallel
        self._slots = SlotTable(self.capacity, loaded.make_guides())
        is_open = self._slots.is_open
        self._kv_cache = loaded.make_kv_cache(report.num_blocks)
        self._state_pool = StatePool(loaded.shape.state_specs, self.capacity, loaded.device)
        states = self._state_pool.layers, self._state_pool.positions
        begun = loaded.model, is_open, self._kv_cache, states
        self._plan_parts = [each.begin(*begun) for each in loaded.additions]
        backend = Backend(
            sampler=loaded.sampler,
            has_rules=self._slots.has_logits_rules,
            upload=torch.from_numpy,
            fetch=OnHost,
            fetch_draft_scores=self._fetch_draft_scores,
            catch_up=lambda: None,  # steps run one at a time
        )
        rules = Rules(self._slots, backend, loaded.eos_ids)
        parts = make_parts(self._slots, backend, rules, loaded.model, loaded.pooler)
        self._runner = StepRunner(self._slots, parts)
        self._lay_out = partial(HostComputation, loaded, self._slots, self._forward)
        self._drafter = make_drafter(
            *(self._speculation, settings.speculative_config, self._model, loaded.sampler),
            *(rules, self._kv_cache, self.capacity),
        )
        self._plain_steps = self._choose_plain_steps(loaded)
        self._idle_time = IdleTime()
        self._draft_s = 0.0
        EXPERT_LOADS.source = loaded.expert_loads

    def _choose_plain_steps(self, loaded: LoadedModel) -> PlainSteps | None:
        """None if steps need more than native code computes: drafts, several ranks or pooling."""
        decoder = self._model.decoder(self._eos_ids)
        is_alone = loaded.ranks.size == 1 and self._pooler is None
        if decoder is None or self._speculation.num_drafts or not is_alone:
            return None
        return PlainSteps(self._slots, self._state_pool, decoder, self._eos_ids)

    @property
    def num_running(self) -> int:
        """Number of admitted sequences without an end."""
        return int(self._slots.is_open.sum())

    def reset(self) -> None:
        self._slots.is_open[:] = False
        for part in self._plan_parts:
            part.reset()
        self._idle_time.forget()
        self._draft_s = 0.0

    @torch.inference_mode()
    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        """Runs ``plan``, sets ``output``, then makes the drafts for the next plan. The time of a
        step includes that of the drafts it verified, and not that of optional parts before it."""
        idle_s = self._idle_time.begin_step(time.perf_counter())
        for part in self._plan_parts:
            part.apply(plan, pixels)
        started_s = time.perf_counter()
        self._apply(plan, ids)
        steps, num_steps, recorded = self._run_steps(plan)
        rows, arrays = join_steps(self._slots, steps)
        ended_s = time.perf_counter()
        result = StepResult(
            step=plan.step,
            rows=rows,
            step_s=ended_s - started_s + self._draft_s,
            idle_s=idle_s,
            num_steps=max(1, num_steps),
        )
        output.set_result((result, arrays))
        delivered_s = time.perf_counter()
        if recorded is not None:
            self._draft(recorded)
        self._draft_s = time.perf_counter() - delivered_s
        self._idle_time.end_step(ended_s + self._draft_s, self.num_running)

    def _apply(self, plan: StepPlan, ids: np.ndarray) -> None:
        fresh_blocks = self._slots.apply(plan, ids)
        if self._model.clears_blocks:
            self._kv_cache.clear(fresh_blocks)
        self._state_pool.apply(plan)
        self._drafter.begin(self._slots, plan, fresh_blocks)

    def _run_steps(self, plan: StepPlan) -> tuple[list[StepRows], int, RecordedStep | None]:
        """Returns the rows and the number of steps, and the last step if it has no drafts yet."""
        step_rows: list[StepRows] = []
        num_done = 0
        recorded: RecordedStep | None = None
        while num_done < plan.num_steps:
            if recorded is not None:
                self._draft(recorded)
                recorded = None
            batch = self._prepare(plan)
            if not len(batch.rows.slots):
                break
            if self._plain_steps is not None and self._plain_steps.may_run(plan, batch):
                plain, num_steps = self._plain_steps.run(batch, plan.num_steps - num_done)
                step_rows.append(plain)
                num_done += num_steps
                continue
            rows, recorded = self._run(batch, plan.draft_depth)
            step_rows.append(rows)
            num_done += 1
        return step_rows, num_done, recorded

    def _draft(self, recorded: RecordedStep) -> None:
        self._drafter.draft(self._slots, recorded)
        agree_on_drafts(self._slots, recorded, self._parallel)

    def _prepare(self, plan: StepPlan) -> Batch:
        recomputes_states = self._drafter.recomputes_states and plan.draft_depth > 0
        batch = prepare_batch(
            self._slots, plan, self._kv_cache, self._state_pool, recomputes_states
        )
        for part in self._plan_parts:
            batch = part.lay_out(batch)
        return batch

    def _run(self, batch: Batch, draft_depth: int) -> tuple[StepRows, RecordedStep]:
        step = Step(batch.rows, min(draft_depth, self._speculation.num_drafts))
        computation = self._lay_out(batch)
        step.computation = computation
        self._runner.forward(step)
        result = self._runner.sample(step)
        rows, outcome = self._runner.finish(result), result.outcome
        if self._model.clears_blocks and outcome.has_bad_drafts.any():
            self._kv_cache.clear_slots(batch.kv_slots_of(outcome.has_bad_drafts))
        continuing = batch.rows.sampling_slots[~outcome.has_ended & (outcome.num_emitted > 0)]
        return rows, RecordedStep(batch, computation.hidden, continuing, step.depth)

    def _fetch_draft_scores(self, slots: np.ndarray) -> Fetched:
        scores = self._slots.draft_logprobs[slots], self._slots.draft_ranks[slots]
        return OnHost(*map(torch.from_numpy, scores))

    def _forward(self, batch: Batch) -> Tensor:
        """Hidden states [T, hidden_size] of all tokens."""
        with forward_context(batch.context):
            hidden: Tensor = self._model(self._given(batch), batch.positions)
        return hidden

    def _given(self, batch: Batch) -> Tensor:
        """The input of the model: token ids or embeddings, or hidden states on a later stage."""
        return batch.input_ids if batch.embeddings is None else batch.embeddings


class IdleTime:
    """Measures the time between steps, the delivery of results included. All times are of one
    clock.

    A plan is expected if the last step left sequences open, even if all of them are paused: only
    the scheduler knows.
    """

    def __init__(self) -> None:
        self._since_s: float | None = None

    def end_step(self, now_s: float, num_open: int) -> None:
        self._since_s = now_s if num_open else None

    def forget(self) -> None:
        """All sequences are gone, so no plan is expected."""
        self._since_s = None

    def begin_step(self, now_s: float) -> float:
        """Returns the seconds since the last step, or 0 if no plan was expected."""
        return 0.0 if self._since_s is None else now_s - self._since_s

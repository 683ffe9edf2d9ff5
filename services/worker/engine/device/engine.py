"""The engine on a device: launches steps without waiting for earlier ones. No sockets."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from services.worker.backends.torch_lm import TorchLM
from services.worker.engine.device.chunks import prepare_chunks
from services.worker.engine.device.computation import DeviceComputation
from services.worker.engine.device.device_slots import DeviceSlots, SlotBounds
from services.worker.engine.device.drafts import Drafts, MtpDrafts, NgramDrafts
from services.worker.engine.device.graphs import shapes
from services.worker.engine.device.kernels import choose_device_kernels
from services.worker.engine.device.measure import measure
from services.worker.engine.device.mixed_step import MixedStep
from services.worker.engine.device.offload.offloaded import NUM_BUFFERS, OffloadedLayers
from services.worker.engine.device.out_of_memory import FailedPrompts
from services.worker.engine.device.record_graphs import WantedGraphs, record_graphs
from services.worker.engine.device.recordable import why_not_recordable
from services.worker.engine.device.segments import make_segments
from services.worker.engine.device.states import DeviceStatePool
from services.worker.engine.device.steps import DecodeStep
from services.worker.engine.device.trunk_graphs import trunk_shapes
from services.worker.engine.protocol import StepOutput
from services.worker.layers.weights import Quantized
from services.worker.machine.hardware import why_out_of_memory
from services.worker.machine.streams import DeviceEvent, Download, upload
from services.worker.metrics import EXPERT_LOADS
from services.worker.slots.table import SlotTable
from services.worker.speculation.ngram import NgramDrafter
from services.worker.startup.loaded_model import LoadedModel, load
from services.worker.startup.plan_memory import estimate_requirements, mib, plan_worker
from services.worker.step.parts import make_parts
from services.worker.step.rows import Rows
from services.worker.step.sampling import Rules
from services.worker.step.step import Backend, PendingResult, Step, StepRunner
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import StepPlan, StepResult

log = logging.getLogger(__name__)


def report_offload(loaded: LoadedModel) -> float:
    """Measures and logs the seconds of a step's weight copies; 0 if no layer is offloaded."""
    offloaded = loaded.model.offloaded
    if not isinstance(offloaded, OffloadedLayers):
        return 0.0
    seconds = offloaded.measure()
    for line in offload_lines(offloaded, seconds, _remedies(loaded)):
        log.info(line)
    if offloaded.why_not_pinned:
        log.warning(
            "cpu-offload-gb: host memory cannot be pinned (%s): copies block the host, and there"
            " are no CUDA graphs",
            offloaded.why_not_pinned,
        )
    return seconds


def offload_lines(
    offloaded: OffloadedLayers, seconds: float, remedies: list[str]
) -> tuple[str, str]:
    """``seconds``: the time of a step's copies."""
    layers = f"{offloaded.num_layers} of {offloaded.num_trunk_layers} layers"
    copied, rate = mib(offloaded.step_bytes), offloaded.step_bytes / seconds / 1e9
    return (
        f"cpu-offload-gb: {layers} are in host memory ({copied}), {NUM_BUFFERS} at a time on the"
        f" device ({mib(offloaded.buffer_bytes)})",
        f"each step copies {copied}: {seconds:.3g} s at the link's {rate:.3g} GB/s (measured), so"
        f" there are at most {1 / seconds:.3g} steps/s; remedies: {', '.join(remedies)}",
    )


def _remedies(loaded: LoadedModel) -> list[str]:
    found = ["more sequences in a step"]
    if not any(isinstance(module, Quantized) for module in loaded.model.modules()):
        found.insert(0, "weights of 4 bits (quantization)")
    if not loaded.speculation.num_drafts:
        found.append("drafts (speculative-config)")
    return [*found, "a smaller cpu-offload-gb"]


@dataclass
class LaunchedStep:
    """A step launched on the device."""

    plan: StepPlan
    result: PendingResult
    begins: DeviceEvent
    decided: DeviceEvent
    ends: DeviceEvent  # after its drafts


class DeviceEngine:
    """A model with its KV cache and slots, on a device that runs asynchronously.

    ``submit`` launches a step, and the thread "results" collects its result. Both threads write the
    slot table: the launching thread admits sequences and adds blocks, the collecting thread appends
    tokens and closes slots. A slot is safe to reuse because the scheduler first waits for the
    results of all plans with it.
    """

    runs_ahead = True  # launches a step without waiting for the step before

    def __init__(self, settings: WorkerConfig, progress: Progress) -> None:
        loaded = load(settings, progress, choose_device_kernels)
        _warn_of_acceptance(loaded)
        _check_ranks(loaded)
        may_record = _may_record(loaded)
        wanted = _wanted_graphs(loaded, loaded.max_num_seqs, may_record)
        is_cuda = loaded.device.type == "cuda"
        requirements = (
            measure(loaded, wanted, progress) if is_cuda else estimate_requirements(loaded)
        )
        report = plan_worker(loaded, requirements)
        report.publish()
        self.copies_s = report_offload(loaded)  # of weights, per step
        self.model_info, self.capacity = loaded.model_info, report.capacity
        self.additions = loaded.additions
        self._device = loaded.device
        self._parallel = loaded.parallel
        self._table = SlotTable(self.capacity, loaded.make_guides())
        self._slots = DeviceSlots(self.capacity, self._table, loaded.eos_ids, self._device)
        self._bounds = SlotBounds(self.capacity)
        self._states = DeviceStatePool(loaded.shape.state_specs, self.capacity, self._device)
        of_slots = self._slots.state, report.num_blocks, self._states
        self._segments = make_segments(loaded, *of_slots)
        wanted = _wanted_graphs(loaded, self.capacity.max_num_seqs, may_record)
        self._graphs, self._trunks = record_graphs(self._segments, wanted, self.capacity, progress)
        backend = Backend(
            sampler=loaded.sampler,
            has_rules=self._slots.has_host_rules,
            upload=partial(upload, device=self._device),
            fetch=Download,
            fetch_draft_scores=self._slots.fetch_draft_scores,
            catch_up=self._wait_for_results,
        )
        rules, is_open = Rules(self._table, backend, loaded.eos_ids), self._table.is_open
        states = self._states.layers, np.zeros(0, np.int64)  # positions are on the device
        begun = loaded.model, is_open, self._segments.kv_cache, states
        self._plan_parts = [each.begin(*begun) for each in loaded.additions]
        common = make_parts(self._table, backend, rules, loaded.model, loaded.pooler)
        self._failed_prompts = FailedPrompts(self._table)
        self._drafts = self._make_drafts(loaded)
        parts = [*common, self._failed_prompts, self._drafts, *self._plan_parts]
        self._runner = StepRunner(self._table, parts)
        self._last: LaunchedStep | None = None  # the last one collected
        self._has_more = False  # sequences were open after it
        self._results = ThreadPoolExecutor(1, "results")
        self._num_in_flight = 0
        self._is_collected = threading.Condition()
        self._error: Exception | None = None  # of the first failed step; later steps are void
        EXPERT_LOADS.source = loaded.expert_loads

    def _make_drafts(self, loaded: LoadedModel) -> Drafts:
        match loaded.speculation.method:
            case "mtp":
                return MtpDrafts(self._table, self._slots, self.capacity)
            case "ngram":
                drafter = NgramDrafter(*loaded.settings.speculative_config.lookup_lens)
                return NgramDrafts(self._table, self._slots, drafter, self._wait_for_results)
            case "none":
                return Drafts()

    @property
    def num_running(self) -> int:
        return int(self._table.is_open.sum())

    def reset(self) -> None:
        self._wait_for_results()
        self._table.is_open[:] = False
        self._slots.close()
        for part in self._plan_parts:
            part.reset()
        self._last = None

    def accept_drafts(self, share: float) -> None:
        """Sets the share of drafts accepted unverified, from the next step on. Raises ValueError
        without ``draft-acceptance``."""
        if self._segments.acceptance is None:
            raise ValueError("drafts are accepted unverified only with draft-acceptance")
        self._segments.acceptance.fill_(share)

    @torch.inference_mode()
    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        """Launches ``plan``. A step that needs the results of earlier steps waits for them. Raises
        the error of an earlier step."""
        if self._error is not None:
            raise self._error
        for part in self._plan_parts:
            part.apply(plan, pixels)
        launched = self._launch(plan, ids)
        with self._is_collected:
            self._num_in_flight += 1
        self._results.submit(self._collect, launched, output)

    def _launch(self, plan: StepPlan, ids: np.ndarray) -> LaunchedStep:
        if self._parallel.size > 1:
            self._wait_for_results()  # all ranks must have the same open slots
        fresh_blocks = self._table.apply(plan, ids)
        self._bounds.admit(plan)
        self._slots.update(self._table, plan)
        self._states.apply(plan)
        self._failed_prompts.fail_hits(plan)
        self._drafts.begin(plan, fresh_blocks)
        depth = min(plan.draft_depth, self.capacity.num_speculative_tokens)
        recomputes_states = self._drafts.recomputes_states and depth > 0
        step = Step(self._bounds.rows_of(self._table, plan, recomputes_states), depth)
        begins = DeviceEvent(self._device)
        self._forward(step)
        result = self._runner.sample(step)
        decided = DeviceEvent(self._device)
        if depth and len(step.rows.slots):
            self._drafts.draft(step, result)
        return LaunchedStep(plan, result, begins, decided, ends=DeviceEvent(self._device))

    @torch.inference_mode()
    def _collect(self, launched: LaunchedStep, output: Future[StepOutput]) -> None:
        """Waits for the result; runs on the thread "results"."""
        if self._error is None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # per thread
                found = self._result_of(launched)
            except Exception as error:
                self._error = error
        with self._is_collected:
            self._num_in_flight -= 1
            self._is_collected.notify_all()
        if self._error is None:
            output.set_result(found)
        else:
            output.set_exception(self._error)

    def _result_of(self, launched: LaunchedStep) -> StepOutput:
        """Waits for the outcome."""
        rows, arrays = self._runner.finish(launched.result)
        step_s, idle_s = self._times(launched)
        self._last, self._has_more = launched, bool(self._table.is_open.any())
        return StepResult(launched.plan.step, rows, step_s, idle_s), arrays

    def _times(self, launched: LaunchedStep) -> tuple[float, float]:
        """Returns the seconds of the step, and the idle seconds of the device before it, 0 if no
        sequence was open. A step includes the drafts it verified, made after the previous
        result."""
        launched.decided.wait()
        step_s = launched.decided.since(launched.begins)
        last = self._last
        if last is None:
            return step_s, 0.0
        step_s += last.ends.since(last.decided)
        return step_s, launched.begins.since(last.ends) if self._has_more else 0.0

    def _forward(self, step: Step) -> None:
        """Runs the forward pass. If memory runs out, the step's prompt chunks fail and its decode
        rows run; these need no more than the reserved memory."""
        try:
            self._try_forward(step)
            return
        except torch.OutOfMemoryError as error:
            if self._parallel.size > 1:  # other ranks wait for this step
                raise
            problem = why_out_of_memory(error)
        self._failed_prompts.fail_chunks(step, problem)
        self._try_forward(step)

    def _try_forward(self, step: Step) -> None:
        if len(step.rows.slots):
            step.computation = DeviceComputation(self._table, self._lay_out(step.rows), step.rows)
            self._runner.forward(step)

    def _lay_out(self, rows: Rows) -> DecodeStep | MixedStep:
        decoding = rows.decoding if rows.has_chunks else rows
        if not rows.has_chunks:
            recorded = self._graphs.find(rows.slots, rows.num_drafts)
            if recorded is not None:
                return recorded
        width = 1 + int(decoding.num_drafts.max(initial=0))
        slots = upload(decoding.slots.astype(np.int32), self._device)
        depths = upload(decoding.num_drafts.astype(np.int32), self._device)
        ends = np.minimum(rows.ends + 1, self._table.end[rows.slots])
        max_keys = int(ends[rows.sampling_rows].max(initial=1))
        if not rows.has_chunks:
            return DecodeStep(self._segments, slots, depths, width, max_keys)
        chunks = rows.chunks
        trunk = self._trunks.find(len(slots), width, int(chunks.num_tokens.sum()))
        width = width if trunk is None else trunk.width
        return MixedStep(
            segments=self._segments,
            decoding=slots,
            depths=depths,
            width=width,
            max_keys=max_keys,
            chunks=prepare_chunks(self._table, chunks, len(slots) * width, self._device),
            trunk=trunk,
        )

    def _wait_for_results(self) -> None:
        """Waits for the results of all launched steps."""
        with self._is_collected:
            self._is_collected.wait_for(lambda: not self._num_in_flight)
        if self._error is not None:
            raise self._error


def _warn_of_acceptance(loaded: LoadedModel) -> None:
    """Warns if ``draft-acceptance`` is set. Raises ConfigError if there are no drafts."""
    share = loaded.settings.draft_acceptance
    if share is None:
        return
    if not loaded.speculation.num_drafts:
        raise ConfigError(f"draft-acceptance: {share}: there are no drafts (speculative-config)")
    log.warning(
        "draft-acceptance = %s: drafts are accepted at random, the output is not meaningful", share
    )


def _check_ranks(loaded: LoadedModel) -> None:
    """Raises ConfigError for prompt lookup, because ranks could have different drafts: lookup
    follows grammars, and a grammar is compiled earlier on one rank than on another."""
    if loaded.parallel.size == 1:
        return
    if loaded.speculation.method == "ngram":
        raise ConfigError(
            "speculative-config: several ranks on GPUs support the methods mtp and none, not ngram"
        )
    log.warning("tensor-parallel-size: several ranks on GPUs have never been tested")


def _may_record(loaded: LoadedModel) -> bool:
    """Copies from unpinned memory cannot be recorded. A model not written in operators is tried,
    and the reason is logged if it cannot be recorded."""
    offloaded = loaded.model.offloaded
    if loaded.pooler is not None or loaded.settings.enforce_eager:
        return False
    is_pinned = not isinstance(offloaded, OffloadedLayers) or not offloaded.why_not_pinned
    if not loaded.parallel.least(int(is_pinned)):
        return False
    if not isinstance(loaded.model, TorchLM) and (problem := why_not_recordable(loaded)):
        log.warning("CUDA graphs: none, steps run eagerly: %s", problem)
        return False
    return True


def _wanted_graphs(loaded: LoadedModel, max_rows: int, may_record: bool) -> WantedGraphs:
    """Returns the shapes to record."""
    if not may_record:
        return WantedGraphs()
    settings, max_tokens = loaded.settings, loaded.max_num_batched_tokens
    sizes, num_drafts = settings.cudagraph_capture_sizes, loaded.speculation.num_drafts
    steps = shapes(sizes, max_rows, max_tokens, num_drafts)
    if settings.cudagraph_mode == "full_decode_only":
        return WantedGraphs(steps)
    return WantedGraphs(steps, trunk_shapes(sizes, max_tokens, num_drafts))


build = DeviceEngine

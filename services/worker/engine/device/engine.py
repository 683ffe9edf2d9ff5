"""The engine on a device: launches steps without waiting for the ones before. No sockets."""

import logging
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from kernels.logprobs import logprobs
from kernels.logprobs.row_logprobs import RowLogprobs
from services.worker.backends.torch_lm import TorchLM
from services.worker.engine.device.adjust_logits import adjusted
from services.worker.engine.device.chunks import prepare_chunks
from services.worker.engine.device.collector import Collector, LaunchedStep
from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.graphs import shapes
from services.worker.engine.device.measure import measure
from services.worker.engine.device.mixed_step import MixedStep
from services.worker.engine.device.out_of_memory import REMEDIES, fail
from services.worker.engine.device.planned_rows import HostLengths, PlannedRows
from services.worker.engine.device.record_graphs import WantedGraphs, record_graphs
from services.worker.engine.device.recordable import why_not_recordable
from services.worker.engine.device.segments import make_segments
from services.worker.engine.device.steps import DecodeStep, Step
from services.worker.engine.device.token_logprobs import PendingLogprobs
from services.worker.engine.device.trunk_graphs import trunk_shapes
from services.worker.engine.protocol import StepOutput
from services.worker.layers.offloaded import NUM_BUFFERS, OffloadedLayers
from services.worker.layers.weights import Quantized
from services.worker.machine.hardware import why_out_of_memory
from services.worker.machine.streams import DeviceEvent, Download, upload
from services.worker.metrics import EXPERT_LOADS
from services.worker.slots.table import SlotTable
from services.worker.startup.choose_backend import choose_device_kernels
from services.worker.startup.loaded_model import LoadedModel, load
from services.worker.startup.plan_memory import estimate_requirements, mib, plan_worker
from services.worker.step.prompt_logprobs import ask_prompts
from services.worker.step.results import RowPart
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import StepPlan

log = logging.getLogger(__name__)


def report_offload(loaded: LoadedModel) -> float:
    """Measures the seconds that a step's copies to the device take, 0 where all weights are
    there."""
    offloaded = loaded.model.offloaded
    if offloaded is None:
        return 0.0
    seconds = offloaded.measure()
    for line in offload_lines(offloaded, seconds, _remedies(loaded)):
        log.info(line)
    if offloaded.why_not_pinned:
        log.warning(
            "cpu-offload-gb: the host's memory cannot be pinned (%s): copies hold up the host, and"
            " there are no CUDA graphs",
            offloaded.why_not_pinned,
        )
    return seconds


def offload_lines(
    offloaded: OffloadedLayers, seconds: float, remedies: list[str]
) -> tuple[str, str]:
    """``seconds`` are those of a step's copies."""
    layers = f"{offloaded.num_layers} of {offloaded.num_trunk_layers} layers"
    copied, rate = mib(offloaded.step_bytes), offloaded.step_bytes / seconds / 1e9
    return (
        f"cpu-offload-gb: {layers} are in the host's memory ({copied}), {NUM_BUFFERS} at a time on"
        f" the device ({mib(offloaded.buffer_bytes)})",
        f"each step copies {copied}: {seconds:.3g} s at the link's {rate:.3g} GB/s (measured), so"
        f" there are at most {1 / seconds:.3g} steps/s; what helps: {', '.join(remedies)}",
    )


def _remedies(loaded: LoadedModel) -> list[str]:
    found = ["more sequences in a step"]
    if not any(isinstance(module, Quantized) for module in loaded.model.modules()):
        found.insert(0, "weights of 4 bits (quantization)")
    if not loaded.speculation.num_drafts:
        found.append("drafts (speculative-config)")
    return [*found, "a smaller cpu-offload-gb"]


class DeviceEngine:
    """A model with its KV cache and the slots of its sequences, on a device that works by itself.

    ``submit`` launches a step, and a thread of the engine's own collects its result. The table of
    slots is the launching thread's where a sequence is admitted and gets blocks, and the collecting
    one's where it runs on and ends: the scheduler gives a slot to no other sequence before the
    results of all plans that name it have come.
    """

    def __init__(self, settings: WorkerConfig, progress: Progress) -> None:
        loaded = load(settings, progress, choose_device_kernels)
        _warn_of_acceptance(loaded)
        _check_ranks(loaded)
        wanted = _wanted_graphs(loaded)
        is_cuda = loaded.device.type == "cuda"
        requirements = (
            measure(loaded, wanted, progress) if is_cuda else estimate_requirements(loaded)
        )
        report = plan_worker(loaded, requirements)
        report.publish()
        self.copies_s = report_offload(loaded)  # of weights, in each step
        self.model_info, self.capacity = loaded.model_info, loaded.capacity(report.num_blocks)
        self._device = loaded.device
        self._method = loaded.speculation.method
        self._pooler = loaded.pooler
        self._parallel = loaded.parallel
        self._eos_ids = loaded.eos_ids
        self._table = SlotTable(self.capacity, loaded.make_guides())
        self._slots = DeviceSlots(self.capacity, self._table, self._eos_ids, self._device)
        self._lengths = HostLengths(self.capacity)
        self._segments = make_segments(loaded, self._slots.state, report.num_blocks)
        graphs = record_graphs(self._segments, wanted, self.capacity, progress)
        self._graphs, self._trunks = graphs
        self._collector = Collector(self._table, loaded, self.capacity)
        self._has_failed = False  # prompts of the step before, for want of memory
        self._results = ThreadPoolExecutor(1, "results")
        self._num_in_flight = 0
        self._is_collected = threading.Condition()
        self._error: Exception | None = None  # of the first step that broke: what follows is void
        EXPERT_LOADS.source = loaded.expert_loads

    @property
    def num_running(self) -> int:
        return int(self._table.is_open.sum())

    def reset(self) -> None:
        self._wait_for_results()
        self._table.is_open[:] = False
        self._slots.close()
        self._collector.forget()

    def accept_drafts(self, share: float) -> None:
        """Sets the share of drafts that count as accepted, from the next step on. Raises
        ValueError where ``draft-acceptance`` is not set."""
        if self._segments.acceptance is None:
            raise ValueError("only with draft-acceptance are drafts accepted without a look")
        self._segments.acceptance.fill_(share)

    @torch.inference_mode()
    def submit(self, plan: StepPlan, ids: np.ndarray, output: Future[StepOutput]) -> None:
        """Puts ``plan`` on the device. A step that needs results of earlier ones waits for them.
        Raises the error of an earlier step."""
        if self._error is not None:
            raise self._error
        launched = self._launch(plan, ids)
        with self._is_collected:
            self._num_in_flight += 1
        self._results.submit(self._collect, launched, output)

    def _launch(self, plan: StepPlan, ids: np.ndarray) -> LaunchedStep:
        if self._parallel.size > 1:
            self._wait_for_results()  # which slots are open must be the same for all ranks
        fresh_blocks = self._table.apply(plan, ids)
        self._lengths.admit(self._table, plan)
        self._slots.update(self._table, plan)
        failed = self._fail_hits(plan) if self._has_failed else []
        depth = min(plan.draft_depth, self.capacity.num_speculative_tokens)
        if self._method == "mtp":
            self._begin_pairs(plan, fresh_blocks)
        recomputes_states = self._method == "mtp" and depth > 0
        planned = self._lengths.rows_of(self._table, plan, recomputes_states)
        if self._method == "mtp" and depth:
            self._collector.note_chunk_pairs(planned)
        launched = LaunchedStep(plan, planned, depth, DeviceEvent(self._device))
        launched.failed += failed
        self._run(launched)
        self._has_failed = bool(launched.failed)
        return launched

    @torch.inference_mode()
    def _collect(self, launched: LaunchedStep, output: Future[StepOutput]) -> None:
        """Waits for the result, on the thread of the results."""
        if self._error is None:
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)  # of this thread
                found = self._collector.collect(launched)
            except Exception as error:
                self._error = error
        with self._is_collected:
            self._num_in_flight -= 1
            self._is_collected.notify_all()
        if self._error is None:
            output.set_result(found)
        else:
            output.set_exception(self._error)

    def _run(self, launched: LaunchedStep) -> None:
        step = self._forward(launched) if launched.planned.num_rows else None
        if step is not None:
            self._finish(launched, *step)
        else:
            launched.decided = launched.ends = DeviceEvent(self._device)

    def _forward(self, launched: LaunchedStep) -> tuple[Step, Tensor] | None:
        """Runs the forward pass. Where memory is short, fails the step's prompt chunks and runs the
        rest; steps that only decode need no more than was reserved."""
        try:
            return self._try_forward(launched.planned)
        except torch.OutOfMemoryError as error:
            if self._parallel.size > 1:  # the others wait for this step
                raise
            problem = why_out_of_memory(error)
        self._fail_chunks(launched, problem)
        return self._try_forward(launched.planned) if launched.planned.num_rows else None

    def _try_forward(self, planned: PlannedRows) -> tuple[Step, Tensor]:
        step = self._prepare(planned)
        return step, step.forward()

    def _fail_chunks(self, launched: LaunchedStep, problem: str) -> None:
        """Fails the prompt chunks and takes them out of the step. Raises torch.OutOfMemoryError
        where there are none."""
        planned = launched.planned
        slots = planned.chunk_slots
        if not len(slots):
            raise torch.OutOfMemoryError(f"a step that only decodes: {problem}; {REMEDIES}")
        log.error("a step with %d prompts: %s; %s", len(slots), problem, REMEDIES)
        launched.failed += fail(self._table, slots, problem)
        launched.planned = planned.without_chunks()

    def _fail_hits(self, plan: StepPlan) -> list[RowPart]:
        """Fails the sequences of ``plan`` with a cached prefix: the plan was made before the
        scheduler learnt that prompts failed, so their blocks may be part of such a prefix."""
        slots = np.array([row.slot for row in plan.admit if row.num_cached], np.int64)
        return fail(self._table, slots, "a prefix of its prompt was not computed")

    def _finish(self, launched: LaunchedStep, step: Step, logits: Tensor) -> None:
        slots = launched.planned.slots
        if len(slots):
            self._sample_and_accept(launched, step, logits)
        if isinstance(step, MixedStep):
            self._take_prompts(launched, step)
        launched.decided = DeviceEvent(self._device)
        if self._segments.drafts and launched.depth:
            step.draft(launched.depth)
            if self._slots.has_host_rules[slots].any():
                launched.drafts = self._download_drafts(slots)
        launched.ends = DeviceEvent(self._device)

    def _take_prompts(self, launched: LaunchedStep, step: MixedStep) -> None:
        planned, hidden = launched.planned, step.hidden[step.num_decoded :]
        chunks = planned.chunk_slots, planned.chunk_starts, planned.chunk_nums, hidden
        if self._pooler is not None:
            launched.pooled = self._pooler.pool(self._table, *chunks)
            return
        model, vocab_size = self._segments.model, self.capacity.vocab_size
        launched.prompts = ask_prompts(self._table, *chunks, vocab_size, model.logits, self._score)

    def _score(self, logits: Tensor, tokens: np.ndarray, num_top: int | None) -> RowLogprobs:
        return logprobs(logits, upload(tokens, self._device), num_top)

    def _prepare(self, planned: PlannedRows) -> Step:
        if self._method == "ngram" and planned.depths.any():
            self._wait_for_results()
            self._slots.set_drafts(self._table, planned.decode_slots)
        if not len(planned.chunk_slots):
            recorded = self._graphs.find(planned.decode_slots, planned.depths)
            if recorded is not None:
                return recorded
        width = 1 + int(planned.depths.max(initial=0))
        slots = upload(planned.decode_slots.astype(np.int32), self._device)
        depths = upload(planned.depths.astype(np.int32), self._device)
        max_keys = int(self._lengths.bounds[planned.slots].max(initial=1))
        if not len(planned.chunk_slots):
            return DecodeStep(self._segments, slots, depths, width, max_keys)
        trunk = self._trunks.find(len(slots), width, int(planned.chunk_nums.sum()))
        width = width if trunk is None else trunk.width
        tables, num_decoded = self._slots.state.block_tables, len(planned.decode_slots) * width
        chunks = prepare_chunks(self._table, planned, tables, num_decoded)
        return MixedStep(
            segments=self._segments,
            decoding=slots,
            depths=depths,
            width=width,
            max_keys=max_keys,
            chunks=chunks,
            trunk=trunk,
        )

    def _sample_and_accept(self, launched: LaunchedStep, step: Step, logits: Tensor) -> None:
        slots = launched.planned.slots
        if self._table.wants_draft_logprobs[slots].any():
            launched.draft_logprobs = self._download_draft_logprobs(slots)
        changed = None
        has_host_rules = self._slots.has_host_rules
        if has_host_rules[slots].any():
            self._wait_for_results()  # while the device computes the logits
            rows = launched.planned, logits, len(logits) // len(step.slots)
            changed = adjusted(self._table, *rows, self._eos_ids, has_host_rules)
        sampler_output = step.sample_and_accept(changed)
        launched.logprobs = PendingLogprobs(self._table, slots, sampler_output)
        launched.packed = Download(sampler_output.accepted.packed[: len(slots)])

    def _begin_pairs(self, plan: StepPlan, fresh_blocks: np.ndarray) -> None:
        mtp_coverage = self._collector.mtp_coverage
        mtp_coverage.begin(self._table, plan, fresh_blocks)
        if plan.admit:
            slots = np.array([row.slot for row in plan.admit])
            self._slots.set_pairs(slots, mtp_coverage.starts[slots], mtp_coverage.ends[slots])

    def _download_drafts(self, slots: np.ndarray) -> Download:
        state, rows = self._slots.state, upload(slots, self._device)
        return Download(state.ids[rows, 1:], state.num_drafts[rows])

    def _download_draft_logprobs(self, slots: np.ndarray) -> Download:
        state, rows = self._slots.state, upload(slots, self._device)
        return Download(state.draft_logprobs[rows], state.draft_ranks[rows])

    def _wait_for_results(self) -> None:
        """Waits until the results of all steps that were launched have come."""
        with self._is_collected:
            self._is_collected.wait_for(lambda: not self._num_in_flight)
        if self._error is not None:
            raise self._error


def _warn_of_acceptance(loaded: LoadedModel) -> None:
    """Warns where ``draft-acceptance`` is set. Raises ConfigError where there are no drafts."""
    share = loaded.settings.draft_acceptance
    if share is None:
        return
    if not loaded.speculation.num_drafts:
        raise ConfigError(f"draft-acceptance: {share}: there are no drafts (speculative-config)")
    log.warning(
        "draft-acceptance = %s: drafts are accepted at random, the output is not meaningful", share
    )


def _check_ranks(loaded: LoadedModel) -> None:
    """Raises ConfigError for drafts that ranks could not agree on: those of prompt lookup follow
    grammars, which are ready on one rank earlier than on another."""
    if loaded.parallel.size == 1:
        return
    if loaded.speculation.method == "ngram":
        raise ConfigError(
            "speculative-config: method ngram is not for several ranks on GPUs; mtp and none are"
        )
    log.warning("tensor-parallel-size: ranks on GPUs were never tried")


def _wanted_graphs(loaded: LoadedModel) -> WantedGraphs:
    """Returns the shapes of what to record. A model that is not written in operators may not be
    recordable, which is logged, nor are copies of memory that is not pinned."""
    settings, offloaded = loaded.settings, loaded.model.offloaded
    if loaded.pooler is not None or settings.enforce_eager or settings.attention_backend == "sdpa":
        return WantedGraphs()
    is_pinned = offloaded is None or not offloaded.why_not_pinned
    if not loaded.parallel.least(int(is_pinned)):
        return WantedGraphs()
    if not isinstance(loaded.model, TorchLM) and (problem := why_not_recordable(loaded)):
        log.warning("CUDA graphs: none, steps run eagerly: %s", problem)
        return WantedGraphs()
    sizes, max_tokens = settings.cudagraph_capture_sizes, loaded.max_num_batched_tokens
    num_drafts = loaded.speculation.num_drafts
    steps = shapes(sizes, loaded.max_num_seqs, max_tokens, num_drafts)
    if settings.cudagraph_mode == "full_decode_only":
        return WantedGraphs(steps)
    return WantedGraphs(steps, trunk_shapes(sizes, max_tokens, num_drafts))

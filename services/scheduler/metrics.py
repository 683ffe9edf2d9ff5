"""Metrics of the scheduler, with vLLM's names where the meaning is the same, and the log of ended
sequences."""

import time
from dataclasses import dataclass

from prometheus_client import Counter, Gauge, Histogram

from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import Ended, Sequence, instance_of
from shared.errors import RequestError
from shared.process.log import log_end
from shared.wire.kv_groups import tokens_that_fit
from shared.wire.messages import Generate, Overview, RunKind, Stats, StepResult, TokenRun

RUNNING = Gauge("vllm:num_requests_running", "Sequences that have a slot")
WAITING = Gauge("vllm:num_requests_waiting", "Sequences that wait for a slot")
KV_USAGE = Gauge("vllm:kv_cache_usage_perc", "Share of all KV blocks in use, 0 to 1")
BLOCKS = Gauge("shoal_kv_blocks", "KV blocks of all workers", ["state"])
SEQUENCES = Gauge("shoal_sequences", "Entries of the scheduler's table of sequences")
PREEMPTIONS = Counter("vllm:num_preemptions", "Times a sequence was preempted")
REQUEUES = Counter("shoal_requeues", "Sequences requeued after their worker died")
BLOCK_LEAK = Gauge("shoal_kv_block_leak", "Blocks that are allocated but that no sequence owns")
STALLED_WORKERS = Counter(
    "shoal_stalled_workers",
    "Times a worker was dropped because a plan had no result for twice its stall-s",
)
RETAINED = Gauge(
    "shoal_retained_units",
    "Blocks and keep points, cached for a time that clients asked for",
)
PREFIX_QUERIES = Counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up")
PREFIX_HITS = Counter("vllm:prefix_cache_hits", "Tokens of prompts that were in the cache")
PREFIX_HITS_CUT = Counter(
    "shoal_prefix_hits_cut",
    "Tokens of prompts in the cache of layers without a window or state alone",
)
KEEP_POINTS = Gauge(
    "shoal_keep_points", "Prefixes with kept windows or states in the caches of all workers"
)
STATES = Gauge("shoal_states", "Copies of states in the caches of all workers", ["state"])
STEP_SECONDS = Histogram(
    "shoal_step_seconds",
    "Time of one step in the worker",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)
PLAN_SECONDS = Histogram(
    "shoal_plan_seconds",
    "Time to make one plan that is sent",
    buckets=(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5),
)
STEP_AGE = Gauge(
    "shoal_step_age_seconds",
    "Age of the oldest plan in flight on any worker; 0: none is in flight",
)
STEP_SEQUENCES = Histogram(
    "shoal_step_sequences",
    "Sequences that a step computes; 0: it only releases slots",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
STEP_TOKENS = Histogram(
    "vllm:iteration_tokens_total",
    "Tokens that a step computes, of prompts and others, with the drafts that it is to verify",
    buckets=(0, 1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
)
QUEUE_SECONDS = Histogram(
    "vllm:request_queue_time_seconds",
    "From the arrival of a sequence to its first step",
    buckets=(0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40,
             50, 60, 120, 240, 480, 960, 1920, 7680),
)  # fmt: skip
STEP_PREDICTION = Histogram(
    "shoal_step_prediction_ratio",
    "Time of a plan, relative to its predicted time",
    buckets=(0.25, 0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5, 2, 4),
)
DRAFTS = Counter("vllm:spec_decode_num_drafts", "Times that drafts of a sequence were verified")
DRAFT_TOKENS = Counter("vllm:spec_decode_num_draft_tokens", "Drafts that were verified")
ACCEPTED_TOKENS = Counter("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted")
ACCEPTED_PER_POSITION = Counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos",
    "Drafts that were accepted, by their position among those verified together, from 0",
    ["position"],
)
DRAFT_DEPTH = Gauge(
    "shoal_draft_depth", "Drafts to make of each sequence, as of the last plan", ["worker"]
)


class CoreMetrics:
    """Gauges computed from the core at each scrape, and counters; the core knows nothing of
    metrics."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._counted: dict[Counter, int] = {}
        RUNNING.set_function(lambda: self._num_running)
        WAITING.set_function(lambda: len(core.queues))
        KV_USAGE.set_function(self._usage)
        BLOCKS.labels("free").set_function(lambda: self._num_free)
        BLOCKS.labels("used").set_function(lambda: self._num_blocks - self._num_free)
        BLOCK_LEAK.set_function(self._num_leaked)
        SEQUENCES.set_function(lambda: len(core.sequences))
        KEEP_POINTS.set_function(
            lambda: sum(len(each.pool.keep_points) for each in core.workers.values())
        )
        RETAINED.set_function(
            lambda: sum(each.pool.eviction.num_retained for each in core.workers.values())
        )
        STATES.labels("kept").set_function(
            lambda: sum(each.pool.num_kept_states for each in core.workers.values())
        )
        STATES.labels("free").set_function(
            lambda: sum(each.pool.num_free_states for each in core.workers.values())
        )

    def count(self) -> None:
        """Adds the changes since the last call to the counters."""
        totals = {
            PREEMPTIONS: self._core.planner.preemption.num,
            REQUEUES: self._core.num_requeues,
            PREFIX_QUERIES: self._core.num_prefix_queries,
            PREFIX_HITS: self._core.num_prefix_hits,
            PREFIX_HITS_CUT: self._core.num_prefix_cut,
        }
        for counter, total in totals.items():
            counter.inc(total - self._counted.get(counter, 0))
        self._counted = totals

    def stats(self) -> Stats:
        """Returns the scheduler's part of a service report."""
        return {
            "waiting": len(self._core.queues),
            "running": self._num_running,
            "preemptions": self._core.planner.preemption.num,
            "prefix_queries": self._core.num_prefix_queries,
            "prefix_hits": self._core.num_prefix_hits,
        }

    def overview(self, scheduler: str) -> Overview:
        return Overview(
            scheduler=scheduler,
            num_workers=len(self._core.workers),
            num_running=self._num_running,
            num_waiting=len(self._core.queues),
            num_blocks=self._num_blocks,
            num_free_blocks=self._num_free,
            num_slots=sum(each.capacity.max_num_seqs for each in self._core.workers.values()),
        )

    @property
    def _num_running(self) -> int:
        return sum(len(worker.running) for worker in self._core.workers.values())

    @property
    def _num_blocks(self) -> int:
        return sum(worker.pool.num_blocks for worker in self._core.workers.values())

    @property
    def _num_free(self) -> int:
        return sum(worker.pool.num_free for worker in self._core.workers.values())

    def _num_leaked(self) -> int:
        """Compares the pools' owner counts with the sequences' blocks. A shared block has several
        owners; a removed sequence owns its blocks until the plans in flight have run."""
        workers = self._core.workers.values()
        num_taken = sum(worker.pool.num_owned for worker in workers)
        running = [each for worker in workers for each in worker.running.values()]
        leaving = [each for worker in workers for each in worker.leaving]
        num_owned = sum(len(each.allocated.blocks) for each in running)
        return num_taken - num_owned - sum(len(each.blocks) for each in leaving)

    def _usage(self) -> float:
        num_blocks = self._num_blocks
        return 1 - self._num_free / num_blocks if num_blocks else 0.0


class StepMetrics:
    """Metrics of plans in flight. Times are monotonic."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._since_s: dict[str, float] = {}  # the worker began the oldest plan in flight
        self._recent: dict[str, RecentSteps] = {}
        STEP_AGE.set_function(lambda: self._age_s(time.monotonic()))

    def begin(self, worker_id: str, planned: Planned, started_s: float, planned_s: float) -> None:
        """The plan was made between ``started_s`` and ``planned_s``."""
        if len(self._core.workers[worker_id].in_flight) == 1:
            self._since_s[worker_id] = planned_s
        plan = planned.plan
        PLAN_SECONDS.observe(planned_s - started_s)
        num_decoded = sum(1 + row.verify_depth for row in plan.decode)
        num_tokens = sum(row.num_tokens for row in plan.prefill) + num_decoded
        for _ in range(plan.num_steps):
            STEP_SEQUENCES.observe(len(plan.prefill) + len(plan.decode))
            STEP_TOKENS.observe(num_tokens)
        DRAFT_DEPTH.labels(worker_id).set(plan.draft_depth)
        for sequence in planned.newcomers:
            QUEUE_SECONDS.observe(planned_s - sequence.arrived_s)

    def end(self, worker_id: str, result: StepResult, now_s: float) -> None:
        """The worker begins its next plan in flight at ``now_s``."""
        self._since_s[worker_id] = now_s
        if ratio := self._core.workers[worker_id].stream_share.last_ratio:
            STEP_PREDICTION.observe(ratio)
        for _ in range(result.num_steps):
            STEP_SECONDS.observe(result.step_s / result.num_steps)
        runs = [row.run for row in result.rows]
        output = [run for run in runs if run.kind == RunKind.OUTPUT]
        drafted = [run for run in output if run.num_drafts]
        _count_drafts(drafted)
        recent = self._recent.setdefault(worker_id, RecentSteps(now_s))
        num_tokens = sum(run.num_tokens for run in output)
        recent.note(result.num_steps, num_tokens, result.step_s, now_s)
        recent.num_drafted += sum(run.num_drafts for run in drafted)
        recent.num_accepted += sum(run.num_accepted for run in drafted)

    def stats(self, worker_id: str, now_s: float) -> Stats:
        """Returns a worker's part of a service report."""
        worker = self._core.workers[worker_id]
        recent = self._recent.setdefault(worker_id, RecentSteps(now_s))
        return {
            "slots_used": len(worker.running),
            "slots": worker.capacity.max_num_seqs,
            "kv_blocks_used": worker.pool.num_blocks - worker.pool.num_free,
            "kv_blocks": worker.pool.num_blocks,
            "kv_tokens": tokens_that_fit(worker.capacity, worker.capacity.max_model_len),
            "kv_tokens_short": tokens_that_fit(
                worker.capacity, min(SHORT, worker.capacity.max_model_len)
            ),
            "tokens_per_s": recent.tokens_per_s(now_s),
            "step_ms": 1000 * recent.step_s(now_s),
            "drafted": recent.num_drafted,
            "accepted": recent.num_accepted,
        }

    def forget(self, worker_id: str) -> None:
        self._since_s.pop(worker_id, None)
        self._recent.pop(worker_id, None)
        DRAFT_DEPTH.remove(worker_id)

    def _age_s(self, now_s: float) -> float:
        """Returns the longest time a worker has spent on its current plan."""
        workers = self._core.workers.items()
        out = [self._since_s[key] for key, worker in workers if worker.in_flight]
        return now_s - min(out) if out else 0.0


def _count_drafts(runs: list[TokenRun]) -> None:
    """``runs`` had drafts to verify."""
    DRAFTS.inc(len(runs))
    DRAFT_TOKENS.inc(sum(run.num_drafts for run in runs))
    ACCEPTED_TOKENS.inc(sum(run.num_accepted for run in runs))
    for position in range(max((run.num_accepted for run in runs), default=0)):
        num_accepted = sum(run.num_accepted > position for run in runs)
        ACCEPTED_PER_POSITION.labels(position).inc(num_accepted)


SHORT = 4096  # tokens of a short request
SPAN_S = 1.0


@dataclass(slots=True)
class _Span:
    started_s: float
    num_steps: int = 0
    num_tokens: int = 0
    step_s: float = 0.0


class RecentSteps:
    """Counts the steps of one worker in the current span of ``SPAN_S`` and the one before.
    ``num_drafted`` and ``num_accepted`` count its drafts since it was attached."""

    def __init__(self, now_s: float) -> None:
        self._before, self._now = _Span(now_s), _Span(now_s)
        self.num_drafted = self.num_accepted = 0

    def note(self, num_steps: int, num_tokens: int, steps_s: float, now_s: float) -> None:
        """A plan of ``num_steps`` took ``steps_s`` and sampled ``num_tokens``."""
        self._roll(now_s)
        self._now.num_steps += num_steps
        self._now.num_tokens += num_tokens
        self._now.step_s += steps_s

    def tokens_per_s(self, now_s: float) -> float:
        self._roll(now_s)
        elapsed_s = now_s - self._before.started_s
        return (self._before.num_tokens + self._now.num_tokens) / max(elapsed_s, SPAN_S)

    def step_s(self, now_s: float) -> float:
        """The mean time of a step; 0 without steps."""
        self._roll(now_s)
        num_steps = self._before.num_steps + self._now.num_steps
        return (self._before.step_s + self._now.step_s) / num_steps if num_steps else 0.0

    def _roll(self, now_s: float) -> None:
        elapsed_s = now_s - self._now.started_s
        if elapsed_s >= SPAN_S:
            is_recent = elapsed_s < 2 * SPAN_S
            self._before = self._now if is_recent else _Span(now_s - SPAN_S)
            self._now = _Span(now_s)


EVENT = "sequence ended"


class RequestLog:
    """Logs each sequence at its end, with times: the core has no clock. Keeps the time each waited
    for its first plan. Times are monotonic."""

    def __init__(self) -> None:
        self._queued_s: dict[tuple[str, int], float] = {}

    def refuse(self, generate: Generate, error: RequestError) -> None:
        for each in generate.sequences:
            log_end(EVENT, each.request, attempt=generate.attempt, reason=error.code)

    def begin(self, newcomers: list[Sequence], now_s: float) -> None:
        for sequence in newcomers:
            self._queued_s[sequence.key] = now_s - sequence.arrived_s

    def end(self, ended: Ended, now_s: float) -> None:
        sequence = ended.sequence
        worker_id = sequence.last_worker_id
        log_end(
            EVENT,
            sequence.request,
            attempt=sequence.attempt,
            reason=ended.reason,
            worker=instance_of(worker_id) if worker_id is not None else None,
            queued_s=self._queued_s.pop(sequence.key, now_s - sequence.arrived_s),
            num_preemptions=sequence.num_preemptions,
            num_worker_deaths=sequence.num_worker_deaths,
        )

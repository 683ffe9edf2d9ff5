"""What the scheduler shows on its admin port; names of vLLM where the meaning is the same."""

from prometheus_client import Counter, Gauge, Histogram

from services.scheduler.scheduler import Scheduler

RUNNING = Gauge("vllm:num_requests_running", "Sequences that have a slot")
WAITING = Gauge("vllm:num_requests_waiting", "Sequences that wait for a slot")
KV_USAGE = Gauge("vllm:kv_cache_usage_perc", "Share of all KV blocks in use, 0 to 1")
BLOCKS = Gauge("shoal_kv_blocks", "KV blocks of all workers", ["state"])
SEQUENCES = Gauge("shoal_sequences", "Entries of the scheduler's table of sequences")
PREEMPTIONS = Counter("vllm:num_preemptions", "Times a sequence gave its blocks back")
BLOCK_LEAK = Gauge("shoal_kv_block_leak", "Blocks that are taken and that no sequence owns")
STEP_SECONDS = Histogram(
    "shoal_step_seconds",
    "Time of one step in the worker",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)


class CoreMetrics:
    """Shows the state of the core, which itself knows nothing of metrics; computed when asked."""

    def __init__(self, core: Scheduler) -> None:
        self._core = core
        self._num_preemptions = 0
        RUNNING.set_function(lambda: sum(len(each.running) for each in core.workers.values()))
        WAITING.set_function(lambda: len(core.waiting) + len(core.suspects) + len(core.stalled))
        KV_USAGE.set_function(self._usage)
        BLOCKS.labels("free").set_function(lambda: self._num_free)
        BLOCKS.labels("used").set_function(lambda: self._num_blocks - self._num_free)
        BLOCK_LEAK.set_function(lambda: self._num_blocks - self._num_free - self._num_owned)
        SEQUENCES.set_function(lambda: len(core.sequences))

    def count(self) -> None:
        """What happened since the last time."""
        PREEMPTIONS.inc(self._core.num_preemptions - self._num_preemptions)
        self._num_preemptions = self._core.num_preemptions

    @property
    def _num_blocks(self) -> int:
        return sum(worker.pool.num_blocks for worker in self._core.workers.values())

    @property
    def _num_free(self) -> int:
        return sum(worker.pool.num_free for worker in self._core.workers.values())

    @property
    def _num_owned(self) -> int:
        workers = self._core.workers.values()
        return sum(len(each.blocks) for worker in workers for each in worker.running.values())

    def _usage(self) -> float:
        num_blocks = self._num_blocks
        return 1 - self._num_free / num_blocks if num_blocks else 0.0

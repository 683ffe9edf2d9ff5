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
STEPS = Counter("shoal_steps", "Steps that the workers have finished")
STEP_SECONDS = Histogram(
    "shoal_step_seconds",
    "Time of one step in the worker",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)


class CoreMetrics:
    """Shows the state of the core, which itself knows nothing of metrics."""

    def __init__(self) -> None:
        self._num_preemptions = 0

    def update(self, core: Scheduler) -> None:
        workers = core.workers.values()
        num_blocks = sum(worker.pool.num_blocks for worker in workers)
        num_free = sum(worker.pool.num_free for worker in workers)
        num_owned = sum(len(each.blocks) for worker in workers for each in worker.running.values())
        RUNNING.set(sum(len(worker.running) for worker in workers))
        WAITING.set(len(core.waiting))
        KV_USAGE.set((num_blocks - num_free) / num_blocks if num_blocks else 0)
        BLOCKS.labels("free").set(num_free)
        BLOCKS.labels("used").set(num_blocks - num_free)
        BLOCK_LEAK.set(num_blocks - num_free - num_owned)
        SEQUENCES.set(len(core.sequences))
        PREEMPTIONS.inc(core.num_preemptions - self._num_preemptions)
        self._num_preemptions = core.num_preemptions

"""What the scheduler shows on its admin port; names of vLLM where the meaning is the same."""

from prometheus_client import Counter, Gauge, Histogram

from services.scheduler.scheduler import Scheduler

RUNNING = Gauge("vllm:num_requests_running", "Sequences that have a slot")
WAITING = Gauge("vllm:num_requests_waiting", "Sequences that wait for a slot")
KV_USAGE = Gauge("vllm:kv_cache_usage_perc", "Share of all KV blocks in use, 0 to 1")
BLOCKS = Gauge("shoal_kv_blocks", "KV blocks of all workers", ["state"])
SEQUENCES = Gauge("shoal_sequences", "Entries of the scheduler's table of sequences")
PREEMPTIONS = Gauge("vllm:num_preemptions", "Sequences that gave their blocks back, so far")
STEPS = Counter("shoal_steps", "Steps that the workers have finished")
STEP_SECONDS = Histogram(
    "shoal_step_seconds",
    "Time of one step in the worker",
    buckets=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5),
)


def update(scheduler: Scheduler) -> None:
    workers = scheduler.workers.values()
    num_blocks = sum(worker.pool.num_blocks for worker in workers)
    num_free = sum(worker.pool.num_free for worker in workers)
    RUNNING.set(sum(len(worker.running) for worker in workers))
    WAITING.set(len(scheduler.waiting))
    KV_USAGE.set((num_blocks - num_free) / num_blocks if num_blocks else 0)
    BLOCKS.labels("free").set(num_free)
    BLOCKS.labels("used").set(num_blocks - num_free)
    SEQUENCES.set(len(scheduler.sequences))
    PREEMPTIONS.set(scheduler.num_preemptions)

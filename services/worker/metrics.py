"""What a worker counts."""

from prometheus_client import Counter, Gauge

STEPS = Counter("shoal_steps", "Steps that were computed")
STEP_BUSY_SECONDS = Counter(
    "shoal_step_busy_seconds", "Seconds spent in steps, counted when a step ends"
)
STEP_IDLE_SECONDS = Counter(
    "shoal_step_idle_seconds",
    "Seconds idle, waiting for the next plan while sequences were running",
)
GUIDE_MASKS = Counter("shoal_worker_guide_masks", "Masks of ids that a grammar allows")
GUIDE_MASK_SECONDS = Counter(
    "shoal_worker_guide_mask_seconds",
    "Seconds spent on masks",
)
SEQUENCES = Gauge("shoal_worker_sequences", "Sequences that were admitted and have not ended")
MEMORY = Gauge("shoal_memory_bytes", "Memory as planned at the start", ["kind"])
WEIGHTS, KV_CACHE, PEAK = (MEMORY.labels(kind) for kind in ("weights", "kv_cache", "peak"))
PARAMETERS = Gauge(
    "shoal_model_parameters",
    "Parameters of the model: all, and those that a token is computed with",
    ["kind"],
)


def show_parameters(total: int, active: int) -> None:
    """``active`` are those that one token is computed with."""
    PARAMETERS.labels("total").set(total)
    PARAMETERS.labels("active").set(active)


def show_memory(weights: int, kv_cache: int, peak: int) -> None:
    """Bytes; ``peak`` is what a step takes beyond the others, at most."""
    WEIGHTS.set(weights)
    KV_CACHE.set(kv_cache)
    PEAK.set(peak)

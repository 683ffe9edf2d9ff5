"""Metrics of a worker."""

from collections.abc import Iterable

from prometheus_client import REGISTRY, Counter, Gauge, Info, Metric
from prometheus_client.registry import Collector

from shared.wire.messages import Stats

STEPS = Counter("shoal_steps", "Computed steps")
STEP_BUSY_SECONDS = Counter(
    "shoal_step_busy_seconds", "Seconds spent in steps, counted when a step ends"
)
STEP_IDLE_SECONDS = Counter(
    "shoal_step_idle_seconds",
    "Seconds idle, waiting for the next plan while sequences were running",
)
STAGE_STEPS = Counter("shoal_worker_stage_steps", "Steps with this stage's part computed")
STAGE_STEPS_AHEAD = Counter(
    "shoal_worker_stage_steps_ahead",
    "Steps this stage, not the last one, began while others were under way",
)
STAGE_BUSY_SECONDS = Counter(
    "shoal_worker_stage_busy_seconds",
    "Seconds this stage computed, with a plan and the states of the stage before",
)
GUIDE_MASKS = Counter("shoal_worker_guide_masks", "Masks of ids allowed by a grammar")
GUIDE_MASK_SECONDS = Counter(
    "shoal_worker_guide_mask_seconds",
    "Seconds spent on masks",
)
SEQUENCES = Gauge("shoal_worker_sequences", "Admitted sequences that have not ended")
MEMORY = Gauge("shoal_memory_bytes", "Memory as planned at the start", ["kind"])
WEIGHTS, KV_CACHE, PEAK = (MEMORY.labels(kind) for kind in ("weights", "kv_cache", "peak"))
RANKS = Gauge("shoal_worker_ranks", "Processes that compute the model together, this one included")
PARAMETERS = Gauge(
    "shoal_model_parameters",
    "Parameters of the model: all (total), and the ones used for one token (active)",
    ["kind"],
)
DEVICE = Info("shoal_worker_device", "The worker's device and kernels")
_device: Stats = {}


class _OfModel(Collector):
    """Metrics of some models only, from the loading of one on."""

    def __init__(self) -> None:
        self.source: Collector | None = None

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        return [] if self.source is None else self.source.collect()


EXPERT_LOADS = _OfModel()
REGISTRY.register(EXPERT_LOADS)


def show_device(name: str, kernels: str, num_threads: int) -> None:
    DEVICE.info({"device": name, "kernels": kernels, "threads": str(num_threads)})
    _device.update(device=name, kernels=kernels, threads=num_threads)


def device_stats() -> Stats:
    """Returns the values of ``show_device``; empty before a model is loaded."""
    return dict(_device)


def memory_stats() -> Stats:
    """Returns bytes from ``show_memory``."""
    read = REGISTRY.get_sample_value
    kinds = ("weights", "kv_cache")
    return {f"{kind}_bytes": int(read("shoal_memory_bytes", {"kind": kind}) or 0) for kind in kinds}


def show_parameters(total: int, active: int) -> None:
    """``active`` is the number of parameters used for one token."""
    PARAMETERS.labels("total").set(total)
    PARAMETERS.labels("active").set(active)


def show_memory(weights: int, kv_cache: int, peak: int, num_ranks: int) -> None:
    """Bytes of this rank. ``peak`` is the most a step takes in addition to the others."""
    RANKS.set(num_ranks)
    WEIGHTS.set(weights)
    KV_CACHE.set(kv_cache)
    PEAK.set(peak)

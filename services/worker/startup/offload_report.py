"""What layers in the host's memory cost, said at the start."""

import logging

from services.worker.layers.offloaded import NUM_BUFFERS, OffloadedLayers
from services.worker.layers.weights import Quantized
from services.worker.startup.loaded_model import LoadedModel
from services.worker.startup.plan_memory import mib

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

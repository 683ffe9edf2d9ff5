"""Engines on the CPU, one for each backend."""

from pathlib import Path
from typing import Any

from services.worker.engine.build import engine
from services.worker.engine.host import HostEngine
from services.worker.startup import implementations
from shared.settings.worker import WorkerConfig

AnyEngine = Any  # with private attributes, which tests read

KERNELS: dict[str, dict[str, Any]] = {
    "torch": {"native_kernels": False, "block_size": 4},
    "native": {"native_kernels": True, "block_size": 16},
}
# The engine for GPUs, here on the CPU with torch's operators.
DEVICE = {"native_kernels": False, "block_size": 4, "cudagraph_capture_sizes": [1, 4, 16]}
ENGINES = {**KERNELS, "device": DEVICE}


class NotInstalled(Exception):
    """A wing is not a part of this installation."""


def make_engine(folder: Path, kernels: str = "torch", **settings: Any) -> AnyEngine:
    """``kernels`` is a key of ``ENGINES``. It has no other worker to send blocks to. Raises
    NotInstalled."""
    if kernels not in {*KERNELS, *implementations.ENGINES}:
        raise NotInstalled(f"the engine {kernels}")
    defaults: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 24, "num_threads": 1}
    given = defaults | ENGINES[kernels] | settings
    config = WorkerConfig(model=folder, device="cpu", **({"kv_transfer": False} | given))
    build = engine("device") if kernels == "device" else HostEngine
    return build(config, lambda text, fraction: None)

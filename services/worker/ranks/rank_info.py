"""The common facts of all ranks of a worker: the model and the settings of its computation."""

import torch

from kernels.cpu.build import library_name
from kernels.cpu.library import find_variant
from services.worker.machine.hardware import choose_dtype
from shared.model_folder import read_model_info
from shared.model_location import locate_model
from shared.settings.base import Settings
from shared.settings.worker import RANK_SETTINGS, WorkerConfig
from shared.version import VERSION
from shared.wire.messages import MAX_NAME_CHARS, RankInfo

# Settings of one host: its hardware, its paths, and limits decided by the smallest rank.
OF_ONE_HOST = (
    set(Settings.model_fields)
    | RANK_SETTINGS
    | {"model", "quantization_cache", "scheduler_address", "gpu_claims", "stall_s"}
    | {"node_rank", "master_addr", "num_threads", "numa_node"}
    | {"gpu_memory_utilization", "kv_cache_memory_bytes"}
)


def rank_info(config: WorkerConfig) -> RankInfo:
    """Raises ConfigError if the model does not exist."""
    settings = {
        name.replace("_", "-"): str(getattr(config, name))[:MAX_NAME_CHARS]
        for name in WorkerConfig.model_fields.keys() - OF_ONE_HOST
    }
    model = read_model_info(locate_model(config.model).folder, [], config.max_model_len)
    variant = find_variant()
    settings |= {
        "model": model.fingerprint,
        "dtype": str(choose_dtype(config.dtype, torch.device("cpu"))).removeprefix("torch."),
        "native code": "none" if variant is None else library_name(variant),
        "Shoal": VERSION,
    }
    return RankInfo(config.rank, settings)


def difference(theirs: RankInfo, ours: RankInfo) -> str | None:
    """Names the differences, with the values of both, or returns None."""
    names = sorted(theirs.settings.keys() | ours.settings.keys())
    found = [(name, theirs.settings.get(name), ours.settings.get(name)) for name in names]
    text = "; ".join(
        f"{name} is {value}, and {own} on the first host"
        for name, value, own in found
        if value != own
    )
    return text or None

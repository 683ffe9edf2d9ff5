"""Builds the engine that suits the device."""

from importlib import import_module
from typing import cast

import torch

from services.worker.engine.host import HostEngine
from services.worker.engine.protocol import BuildEngine, Engine, EngineModule
from services.worker.startup.implementations import ENGINES
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig


def build_engine(settings: WorkerConfig, progress: Progress) -> Engine:
    """Raises ConfigError if model, machine and settings do not fit together."""
    is_on_gpu = settings.device != "cpu" and torch.cuda.is_available()
    if settings.pipeline_parallel_size > 1:
        if is_on_gpu:
            raise ConfigError(
                "pipeline-parallel-size: stages are supported on CPUs only; set device to cpu"
            )
        return engine("stages")(settings, progress)
    if not is_on_gpu:
        return HostEngine(settings, progress)
    if "device" not in ENGINES:
        raise ConfigError("device: the engine for GPUs is not installed; set device to cpu")
    return engine("device")(settings, progress)


def engine(name: str) -> BuildEngine:
    """``name`` is a key of ``ENGINES``."""
    return cast(EngineModule, import_module(ENGINES[name])).build

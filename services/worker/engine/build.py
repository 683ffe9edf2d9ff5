"""Builds the engine that suits the device."""

from importlib import import_module
from typing import cast

import torch

from services.worker.engine.host import HostEngine
from services.worker.engine.protocol import BuildEngine, Engine, EngineModule
from services.worker.ranks.stages import StageEngine
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
        return StageEngine(settings, progress)
    return (engine("device") if is_on_gpu else HostEngine)(settings, progress)


def engine(name: str) -> BuildEngine:
    """Raises ConfigError if it is not a part of this installation."""
    if name not in ENGINES:
        raise ConfigError(f'device: the engine "{name}" is not installed; set device to cpu')
    return cast(EngineModule, import_module(ENGINES[name])).build

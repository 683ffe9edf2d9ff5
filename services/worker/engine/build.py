"""Builds the engine that suits the device."""

import torch

from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.host import HostEngine
from services.worker.engine.protocol import Engine
from services.worker.engine.stages import StageEngine
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
    if is_on_gpu:
        return DeviceEngine(settings, progress)
    return HostEngine(settings, progress)

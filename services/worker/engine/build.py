"""Builds the engine that suits the device."""

import torch

from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.host import HostEngine
from services.worker.engine.protocol import Engine
from services.worker.weights.progress import Progress
from shared.config.worker import WorkerConfig


def build_engine(settings: WorkerConfig, progress: Progress) -> Engine:
    """Raises ConfigError as they do."""
    if settings.device != "cpu" and torch.cuda.is_available():
        return DeviceEngine(settings, progress)
    return HostEngine(settings, progress)

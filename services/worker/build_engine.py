"""The engine that suits the device."""

import torch

from services.worker.device.engine import DeviceEngine
from services.worker.engine import Engine
from services.worker.progress import Progress
from shared.config import WorkerConfig


def build_engine(settings: WorkerConfig, progress: Progress) -> Engine | DeviceEngine:
    """Raises ConfigError as they do."""
    if settings.device != "cpu" and torch.cuda.is_available():
        return DeviceEngine(settings, progress)
    return Engine(settings, progress)

"""A tower of a line, with features of three numbers."""

import numpy as np
import torch

from services.worker.media.encoder import Job
from services.worker.media.form import FeatureForm
from shared.media.family import PixelLimits
from shared.media.qwen2_5_vl import SquaresOfPatches
from shared.wire.messages import Item

FAMILY = SquaresOfPatches(0, 1, 1, PixelLimits(1, 40))  # a pixel is a token


def encode(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.reshape(-1, 3).astype(np.float32)) / 7


def form(layout: str = "layout") -> FeatureForm:
    return FeatureForm(FAMILY, layout, 3, torch.float32, torch.device("cpu"))


def job_of(name: str, *numbers: int) -> Job:
    """Images of two pixels."""
    items = [
        Item(start=3 * place, num_tokens=2, size=(1, 1, 2), digest=bytes([number]) * 16)
        for place, number in enumerate(numbers)
    ]
    pixels = {item.digest: np.full(6, item.digest[0], np.uint8) for item in items}
    return Job(name, 1, 3 * len(items), items, pixels)

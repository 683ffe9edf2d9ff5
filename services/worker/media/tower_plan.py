"""The tower of a model, with its memory and the form of its features."""

from collections.abc import Mapping
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from services.worker.machine.hardware import choose_dtype, why_out_of_memory
from services.worker.media.encoder import Encoder
from services.worker.media.form import FeatureForm, layout_of
from shared.errors import ConfigError
from shared.media.family import Family
from shared.process.cores import num_cores
from shared.settings.worker import WorkerConfig

if TYPE_CHECKING:
    from services.worker.media.tower import Sizes, Tower

CACHE_BYTES = 256 << 20


class TowerPlan:
    """For items of ``family`` that fit ``max_len`` ids."""

    def __init__(
        self,
        settings: WorkerConfig,
        folder: Path,
        family: Family,
        dtype: torch.dtype,
        device: torch.device,
        *,
        max_len: int,
    ) -> None:
        self._folder, self._family, self._device = folder, family, device
        self._num_threads = settings.num_threads or max(1, num_cores() - 1)
        self._is_dummy, self._max_len = settings.load_format == "dummy", max_len
        if device.type != "cuda":  # torch's products in a dtype that the CPU has not are slow
            dtype = torch.promote_types(dtype, choose_dtype("auto", device))
        self._dtype = dtype

    @property
    def form(self) -> FeatureForm:
        width = self._family.num_embeddings * self._sizes.hidden_size
        of_settings = {"width": width, "is_dummy": self._is_dummy}
        layout = layout_of(self._folder, self._dtype, self._device, of_settings)
        return FeatureForm(self._family, layout, width, self._dtype, self._device)

    def num_bytes(self, of_step: int = 0) -> Mapping[str, int]:
        """For the largest item, beside the features ``of_step``."""
        sizes, num_patches = self._sizes, self._most_patches
        num_features = self._most_tokens * self._family.num_embeddings
        largest = num_features * sizes.hidden_size * self._dtype.itemsize
        return {
            "images: weights of the tower": sizes.weights,
            "images: features, kept and in a step": CACHE_BYTES + largest + of_step,
            f"images: the largest, of {num_patches} patches": num_patches
            * (sizes.of_patch + num_patches * sizes.of_pair),
        }

    def make_encoder(self) -> Encoder:
        """Raises ConfigError."""
        return Encoder(self._make().features, CACHE_BYTES, self._num_threads)

    def _make(self) -> "Tower":
        """On a GPU it encodes the largest square, so that it has the memory from the start on.
        Raises ConfigError."""
        from services.worker.media.tower import Tower

        sizes = self._sizes
        side = isqrt(sizes.pixels_of_patch * sizes.patches_of_token)
        length = side * isqrt(self._most_patches // sizes.patches_of_token)
        try:
            tower = Tower(self._folder, self._dtype, self._device, is_dummy=self._is_dummy)
            if self._device.type == "cuda":
                limits = self._family.limits
                limits = limits._replace(max_pixels=max(length**2, limits.max_pixels))
                size = self._family.fit(length, length, limits).size
                tower.features(np.zeros((*size, 3), np.uint8))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"gpu-memory-utilization: the tower and an image of {length} x {length} pixels do"
                f" not fit: {why_out_of_memory(error)}; lower it, or set language-model-only"
            ) from None
        return tower

    @property
    def _most_patches(self) -> int:
        """Of the largest image or group of frames that fits ``max_len``."""
        videos, of_image = self._family.videos, self._patches(self._family.limits.max_pixels)
        if videos is None:
            return of_image
        return max(of_image, videos.num_in_tower * self._patches(videos.most_pixels))

    @property
    def _most_tokens(self) -> int:
        """Of the largest image or frame; the frames of a group share them."""
        videos, of_image = self._family.videos, self._family.limits.max_pixels
        most = of_image if videos is None else max(of_image, videos.most_pixels)
        return self._patches(most) // self._sizes.patches_of_token

    def _patches(self, num_pixels: int) -> int:
        """Of as many pixels, or of those that fit."""
        sizes = self._sizes
        most = self._max_len * sizes.patches_of_token
        return min(num_pixels // sizes.pixels_of_patch, most)

    @cached_property
    def _sizes(self) -> "Sizes":
        from services.worker.media.tower import Sizes  # its import takes seconds

        return Sizes(self._folder, self._dtype)

"""Images as an addition to a model on a CPU."""

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from services.worker.backends.operators import Operators
from services.worker.machine.hardware import choose_dtype
from services.worker.media.encoder import Encoder
from services.worker.media.rotations import Rotations
from services.worker.media.table import MediaTable
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.models.qwen2_5_vl import AxesConfig
from services.worker.startup.loaded_model import DEFAULT_BATCHED_TOKENS
from shared.media.family import PREPROCESSOR_FILE, Family, read_family
from shared.process.cores import num_cores
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity

log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20


def check(settings: WorkerConfig, device: torch.device, *, pools: bool, is_ours: bool) -> None:
    """Where images are not supported, texts are computed all the same."""


def make(
    settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
) -> "Media | None":
    if not isinstance(model.config, AxesConfig):
        return None
    family = read_family(folder)
    if family is None:
        log.info("images: not computed: %s has no %s", folder, PREPROCESSOR_FILE)
        return None
    if why := _why_not(settings, model):
        log.info("images: not computed: %s", why)
        return None
    return Media(settings, folder, family, model, model.config, dtype)


def _why_not(settings: WorkerConfig, model: DecoderLM) -> str:
    if settings.device == "cuda" or model.model.rotary.table.is_cuda:
        return "they are on CPUs only"
    if settings.num_ranks > 1:
        return f"they are not with {settings.ranks_setting} {settings.num_ranks}"
    return "the model pools" if model.lm_head is None else ""


class Media:
    """The images of ``model``: a tower, features, and rotations at positions with three axes."""

    operators: Operators | None = None
    encoder: Encoder

    def __init__(
        self,
        settings: WorkerConfig,
        folder: Path,
        family: Family,
        model: DecoderLM,
        config: AxesConfig,
        dtype: torch.dtype,
    ) -> None:
        self.family = family
        self._settings, self._folder = settings, folder
        computed = choose_dtype("auto", torch.device("cpu"))
        self._dtype = torch.promote_types(dtype, computed)  # torch's products in another are slow
        num_rows = settings.max_num_batched_tokens or DEFAULT_BATCHED_TOKENS["cpu"]
        self._rotations = Rotations(model.model.rotary, config.rope_section, num_rows)
        self._max_len = settings.max_model_len or config.max_position_embeddings
        model.takes_embeddings = True

    def limit(self, capacity: Capacity) -> Capacity:
        return structs.replace(capacity, media=self.family.kinds)

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """For the largest image that fits ``max-model-len``."""
        from services.worker.media.tower import Sizes  # its import takes seconds

        sizes = Sizes(self._folder, self._dtype)
        num_patches = min(
            self.family.limits.max_pixels // sizes.pixels_of_patch,
            self._max_len * sizes.patches_of_token,
        )
        largest = num_patches // sizes.patches_of_token * sizes.of_token
        return {
            "images: weights of the tower": sizes.weights,
            "images: features kept": CACHE_BYTES + largest,
            f"images: the largest, of {num_patches} patches": num_patches * sizes.of_patch,
        }

    def begin(self, model: CausalLM, is_open: np.ndarray) -> MediaTable:
        """Raises ConfigError."""
        from services.worker.media.tower import Tower

        is_dummy = self._settings.load_format == "dummy"
        num_threads = self._settings.num_threads or max(1, num_cores() - 1)
        tower = Tower(self._folder, self._dtype, is_dummy=is_dummy)
        self.encoder = Encoder(tower.features, CACHE_BYTES, num_threads)
        return MediaTable(self.family, self._rotations, self.encoder, model.embed)

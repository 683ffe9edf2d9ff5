"""Images as an addition to a model."""

import logging
from collections.abc import Mapping
from functools import cache, cached_property, partial
from math import isqrt, prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs

from services.worker.backends.operators import Operators
from services.worker.machine.hardware import choose_dtype, why_out_of_memory
from services.worker.media.deep_features import check_first_stage, take_embeddings
from services.worker.media.device_tokens import DeviceTokens, MediaOps
from services.worker.media.encoder import Encoder, RemoteEncoder
from services.worker.media.rotations import Rotations, axes_of
from services.worker.media.table import MediaTable
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.startup.loaded_model import batched_tokens
from shared.errors import ConfigError
from shared.media.families import family_name, read_family
from shared.media.family import PREPROCESSOR_FILE, PROCESSOR_FILE, Family
from shared.model_location import locate_model
from shared.pooling import read_pooling
from shared.process.cores import num_cores
from shared.settings.worker import WorkerConfig
from shared.wire.messages import MAX_SPECULATIVE_TOKENS, Capacity

if TYPE_CHECKING:
    from services.worker.media.tower import Sizes, Tower

log = logging.getLogger(__name__)

CACHE_BYTES = 256 << 20
COPIES = 3  # of inputs that are looked up besides embeddings, in a step with features
SHARED = 2  # copies of a step's features while ranks share them


def check(settings: WorkerConfig, device: torch.device, *, pools: bool, is_ours: bool) -> None:
    """Raises ConfigError for too many stages. Where images are not supported otherwise, texts are
    computed all the same."""
    folder, num_stages = locate_model(settings.model).folder, settings.pipeline_parallel_size
    if num_stages > 1 and is_ours and not pools and (family := read_family(folder)) is not None:
        num_layers = read_model_config(folder).num_hidden_layers
        check_first_stage(num_stages, num_layers, family.num_embeddings)


def make(
    settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
) -> "Media | None":
    if family_name(folder) is None:
        return None
    family = read_family(folder)
    if family is None:
        files = f"{PREPROCESSOR_FILE} or {PROCESSOR_FILE}"
        log.info("images: not computed: %s has no %s that describes them", folder, files)
        return None
    if read_pooling(folder, settings.runner, settings.pooler_config) is not None:
        log.info("images: not computed: the model pools")
        return None
    if problem := _step_problem(settings, family, model):
        raise ConfigError(problem)
    return Media(settings, folder, family, model, dtype)


def _step_problem(settings: WorkerConfig, family: Family, model: DecoderLM) -> str:
    """A step has room for a whole item beside a token of each other sequence."""
    if not family.are_whole:
        return ""
    num_tokens = batched_tokens(settings, _kind_of(model))
    square = family.fit(1, 1, family.limits)
    of_frame = 0 if family.videos is None else family.videos.most_pixels
    most = max(family.limits.max_pixels, of_frame)
    num = most * square.num_tokens // prod(square.size)
    least = num + min(settings.max_num_seqs, num_tokens) - 1
    if num_tokens >= least:
        return ""
    return (
        f"max-num-batched-tokens: {num_tokens}: a step computes all {num} tokens of an image"
        f" beside one of each other sequence: {least} or more are needed, or fewer max-num-seqs,"
        " or language-model-only"
    )


def _kind_of(model: DecoderLM) -> str:
    return "cuda" if model.model.rotary.table.device.type == "cuda" else "cpu"


class Media:
    """The images of ``model``: a tower, features, and rotations at positions with several axes. The
    first rank has the tower, and gives the features of a step to the ranks that share layers."""

    encoder: Encoder

    def __init__(
        self,
        settings: WorkerConfig,
        folder: Path,
        family: Family,
        model: DecoderLM,
        dtype: torch.dtype,
    ) -> None:
        self.family = family
        self._settings, self._folder, self._dtype = settings, folder, dtype
        config, rotary = model.config, model.model.rotary
        self._hidden_size, self._parallel = config.hidden_size, model.parallel
        self._is_first = model.parallel.rank == 0 and model.parallel.stage.is_first
        self._device = rotary.table.device
        kind = _kind_of(model)
        if kind == "cpu":  # torch's products in a dtype that the CPU has not are slow
            self._dtype = torch.promote_types(dtype, choose_dtype("auto", self._device))
        num_rows = batched_tokens(settings, kind)
        num_slots = settings.max_num_seqs
        num_tokens = num_rows + num_slots * MAX_SPECULATIVE_TOKENS  # rows may be padded with these
        shape = num_slots, num_tokens, family.num_embeddings, config.hidden_size
        ids = family.image_ids
        common = ids, dtype, self._device, family.are_whole
        self._tokens = cache(partial(DeviceTokens, *shape, *common, filler=family.filler))
        self._num_more = sum(model.more_sizes)
        scales = model.embedding_scale != 1.0
        self.operators = Operators(device=partial(MediaOps, self._tokens, scales))
        num_axes = len(family.positions([], 0))
        self._rotations = Rotations(rotary, axes_of(config, num_axes), num_rows)
        self._max_len = settings.max_model_len or config.max_position_embeddings
        take_embeddings(model, family.num_embeddings, marks=bool(family.image_ids))

    def limit(self, capacity: Capacity) -> Capacity:
        if self.family.are_whole:
            return structs.replace(capacity, whole_media=self.family.kinds)
        more = tuple(kind for kind in self.family.kinds if kind != "image")
        return structs.replace(capacity, media=("image",), more_media=more)

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """On the first rank for the largest image that fits ``max-model-len``, and on all for the
        features of a step, except the embeddings of its tokens."""
        of_step = self._step_bytes(num_tokens)
        if not self._is_first:
            return {"images: features in a step": of_step}
        sizes, num_patches = self._sizes, self._most_patches
        num_features = self._most_tokens * self.family.num_embeddings
        largest = num_features * sizes.hidden_size * self._dtype.itemsize
        return {
            "images: weights of the tower": sizes.weights,
            "images: features, kept and in a step": CACHE_BYTES + largest + of_step,
            f"images: the largest, of {num_patches} patches": num_patches
            * (sizes.of_patch + num_patches * sizes.of_pair),
        }

    def _step_bytes(self, num_tokens: int) -> int:
        num, num_marks = self.family.num_embeddings, bool(self.family.image_ids)
        num_inputs = num - 1 + num_marks if self._parallel.stage.is_first else num_marks
        if self._parallel.size > 1:
            num_inputs += SHARED * num
        numbers = num_inputs * self._hidden_size + COPIES * self._num_more
        return numbers * num_tokens * torch.float32.itemsize

    def begin(self, model: CausalLM, is_open: np.ndarray, *_: object) -> MediaTable:
        """Raises ConfigError."""
        encoder: Encoder | RemoteEncoder
        if self._is_first:
            num_threads = self._settings.num_threads or max(1, num_cores() - 1)
            encoder = self.encoder = Encoder(self._tower().features, CACHE_BYTES, num_threads)
        else:
            size = self.family.num_embeddings * self._hidden_size
            encoder = RemoteEncoder(size, self._device)
        common = self.family, self._rotations, encoder, model.embed, self._tokens
        return MediaTable(*common, num_slots=len(is_open), parallel=self._parallel)

    def _tower(self) -> "Tower":
        """On a GPU it encodes the largest square, so that it has the memory from the start on.
        Raises ConfigError."""
        from services.worker.media.tower import Tower

        is_dummy, sizes = self._settings.load_format == "dummy", self._sizes
        side = isqrt(sizes.pixels_of_patch * sizes.patches_of_token)
        length = side * isqrt(self._most_patches // sizes.patches_of_token)
        try:
            tower = Tower(self._folder, self._dtype, self._device, is_dummy=is_dummy)
            if self._device.type == "cuda":
                limits = self.family.limits
                limits = limits._replace(max_pixels=max(length**2, limits.max_pixels))
                size = self.family.fit(length, length, limits).size
                tower.features(np.zeros((*size, 3), np.uint8))
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"gpu-memory-utilization: the tower and an image of {length} x {length} pixels do"
                f" not fit: {why_out_of_memory(error)}; lower it, or set language-model-only"
            ) from None
        return tower

    @property
    def _most_patches(self) -> int:
        """Of the largest image or group of frames that fits ``max-model-len``."""
        videos, of_image = self.family.videos, self._patches(self.family.limits.max_pixels)
        if videos is None:
            return of_image
        return max(of_image, videos.num_in_tower * self._patches(videos.most_pixels))

    @property
    def _most_tokens(self) -> int:
        """Of the largest image or frame; the frames of a group share them."""
        videos, of_image = self.family.videos, self.family.limits.max_pixels
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

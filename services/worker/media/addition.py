"""Images as an addition to a model."""

import logging
from collections.abc import Mapping
from functools import cache, partial
from math import prod
from pathlib import Path

import numpy as np
import torch
from msgspec import structs

from services.worker.backends.operators import Operators
from services.worker.media.deep_features import check_first_stage, take_embeddings
from services.worker.media.device_tokens import DeviceTokens, MediaOps
from services.worker.media.encoder import Encoder, RemoteEncoder
from services.worker.media.form import FeatureForm
from services.worker.media.rotations import Rotations, axes_of
from services.worker.media.table import MediaTable
from services.worker.media.tower_plan import TowerPlan
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import read_model_config
from services.worker.startup.loaded_model import batched_tokens
from shared.errors import ConfigError
from shared.media.families import family_name, read_family
from shared.media.family import PREPROCESSOR_FILE, PROCESSOR_FILE, Family
from shared.model_location import locate_model
from shared.pooling import read_pooling
from shared.settings.worker import WorkerConfig
from shared.wire.messages import MAX_SPECULATIVE_TOKENS, Capacity

log = logging.getLogger(__name__)

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
        config, rotary = model.config, model.model.rotary
        self._hidden_size, self._parallel = config.hidden_size, model.parallel
        self._is_first = model.parallel.rank == 0 and model.parallel.stage.is_first
        self._device = rotary.table.device
        max_len = settings.max_model_len or config.max_position_embeddings
        self._plan = TowerPlan(settings, folder, family, dtype, self._device, max_len=max_len)
        num_rows = batched_tokens(settings, _kind_of(model))
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
        num_positions = num_rows + num_slots  # an MTP head has a cached id of each computed again
        self._rotations = Rotations(rotary, axes_of(config, num_axes), num_positions)
        take_embeddings(model, family.num_embeddings, marks=bool(family.image_ids))

    @property
    def form(self) -> FeatureForm:
        return self._plan.form

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
        return self._plan.num_bytes(of_step)

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
            encoder = self.encoder = self._plan.make_encoder()
        else:
            size = self.family.num_embeddings * self._hidden_size
            encoder = RemoteEncoder(size, self._device)
        common = self.family, self._rotations, encoder, model.embed, self._tokens
        return MediaTable(*common, num_slots=len(is_open), parallel=self._parallel)

"""The part of a model that reads images, computed by transformers: pixels → features."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Ernie4_5_VLMoeConfig,
    PreTrainedModel,
)
from transformers.utils import logging as transformers_logging

from services.worker.machine.streams import DeviceEvent, upload
from services.worker.media.preprocessors import read_preprocessor
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json, find_file

transformers_logging.disable_progress_bar()

HOST = torch.device("cpu")

# Numbers of float32 that a step of the tower has for each patch, in hidden and inner sizes: states
# and their norm, then queries, keys and values before and after rotation, or gates and ups.
STATES, ATTENTION, GATES = 2, 8, 3

GEMMA4 = "gemma4"  # its texts have tables without layers too, and it has a tower of sounds

# ERNIE-4.5-VL's config is published in a form that transformers does not know.
ERNIE = "ernie4_5_moe_vl"
OF_TEXTS = ("hidden_size", "vocab_size", "rms_norm_eps", "pad_token_id")
HEAD_DIM = 128  # fits the section of rotations by default; a tower needs none
OF_IMAGES = ("depth", "hidden_size", "hidden_act", "num_heads", "in_channels", "patch_size")


class Tower:
    """The tower of the model in ``folder``, in ``dtype``; random weights if ``is_dummy``. Raises
    ConfigError if its tensors are missing."""

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device = HOST,
        *,
        is_dummy: bool = False,
    ) -> None:
        self._preprocessor = read_preprocessor(folder)
        self._values = self._preprocessor.values
        names = self._preprocessor.names
        model = _made_up(folder, dtype) if is_dummy else _loaded(folder, dtype, names)
        self.model = model.to(device)
        self._device = device
        # The memory of a stream is its own: features do not split the blocks of activations.
        self._stream, self._kept = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        torch.backends.cudnn.allow_tf32 = False  # patches are embedded by a convolution

    @torch.inference_mode()
    def features(self, pixels: np.ndarray) -> Tensor:
        """[frames, height, width, 3] uint8 → [tokens, embeddings · hidden]. The result depends on
        nothing else. On a GPU it is made on a stream of its own, and the caller waits for it."""
        given = self._preprocessor.inputs(pixels, self._values)
        with torch.cuda.stream(self._stream):
            inputs = {name: upload(each, self._device) for name, each in given.items()}
            kind = "video" if "video_grid_thw" in given else "image"
            made = getattr(self.model, f"get_{kind}_features")(**inputs)
            parts = made.pooler_output, *getattr(made, "deepstack_features", ())
            found = torch.cat([_rows(each) for each in parts], -1)
            DeviceEvent(self._device).wait()
        if self._kept is None:
            return found
        with torch.cuda.stream(self._kept):
            kept = found.clone()
            DeviceEvent(self._device).wait()
        return kept


def _rows(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Of the only image, or of all its frames [frames, tokens, hidden]."""
    return features.flatten(0, 1) if isinstance(features, Tensor) else features[0]


class Sizes:
    """The bytes of a tower's ``weights``, ``of_patch`` those that it computes for a patch, and
    ``of_pair`` those for a pair of patches. A feature has ``hidden_size`` numbers for each of its
    embeddings."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            model = _made_up(folder, dtype)
        config = model.config
        states, inner = config.vision_config.hidden_size, config.vision_config.intermediate_size
        self.hidden_size = config.get_text_config().hidden_size
        self.weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        widest = STATES * states + max(ATTENTION * states, GATES * inner)
        preprocessor = read_preprocessor(folder)
        numbers = 2 * preprocessor.patch_numbers + widest
        self.of_patch = numbers * torch.float32.itemsize
        self.of_pair = preprocessor.num_masks * dtype.itemsize
        self.pixels_of_patch = preprocessor.patch_size**2
        self.patches_of_token = preprocessor.merge_size**2


def _loaded(folder: Path, dtype: torch.dtype, names: tuple[str, ...]) -> Any:
    """The names of a tower's tensors have one of ``names`` in them."""
    load: Any = AutoModelForImageTextToText.from_pretrained
    with _quiet():
        model, report = load(folder, config=_config(folder), dtype=dtype, output_loading_info=True)
    missing = sorted(name for name in report["missing_keys"] if any(map(name.__contains__, names)))
    if missing:
        raise ConfigError(
            f"model: {folder} lacks {len(missing)} tensors for images, {missing[0]} among them:"
            " set language-model-only"
        )
    return _without_text(model)


def _made_up(folder: Path, dtype: torch.dtype) -> Any:
    return _without_text(AutoModelForImageTextToText.from_config(_config(folder), dtype=dtype))


def _config(folder: Path) -> Any:
    """With a text model of no layers."""
    config = _published(folder)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types, text.mlp_layer_types = 0, [], []
    if config.model_type == GEMMA4:
        text.hidden_size_per_layer_input, config.audio_config = 0, None
    if hasattr(config, "quantization_config"):  # of texts
        del config.quantization_config
    return config


def _published(folder: Path) -> Any:
    """transformers' config; of texts it has what a tower needs."""
    found = decode_json(find_file(folder, CONFIG_FILE), dict[str, Any])
    if found.get("model_type") != ERNIE:
        return AutoConfig.from_pretrained(folder)
    vision: dict[str, Any] = found["vision_config"]
    given = {name: vision[name] for name in OF_IMAGES if name in vision}
    given["intermediate_size"] = int(given["hidden_size"] * vision.get("mlp_ratio", 4))
    for name in ("spatial", "temporal"):
        given[f"{name}_merge_size"] = found.get(f"{name}_conv_size", 2)
    texts = {name: found[name] for name in OF_TEXTS if name in found}
    texts["head_dim"] = HEAD_DIM
    return Ernie4_5_VLMoeConfig(text_config=texts, vision_config=given)


def _without_text(model: PreTrainedModel) -> Any:
    inner: Any = model.base_model
    inner.language_model = nn.Identity()
    return inner.eval().requires_grad_(False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a report of the texts' tensors, which are not used."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)

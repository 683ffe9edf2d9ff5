"""The part of a model that reads images, computed by transformers: pixels → features."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel
from transformers.utils import logging as transformers_logging

from services.worker.machine.streams import DeviceEvent, upload
from shared.errors import ConfigError
from shared.media.family import PREPROCESSOR_FILE
from shared.model_folder import decode_json

transformers_logging.disable_progress_bar()

HOST = torch.device("cpu")

# Numbers of float32 that a step of the tower has for each patch, in hidden and inner sizes: states
# and their norm, then queries, keys and values before and after rotation, or gates and ups.
STATES, ATTENTION, GATES = 2, 8, 3


class Preprocessor(msgspec.Struct):
    """preprocessor_config.json; the defaults are those of the class it names."""

    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    do_rescale: bool = True
    do_normalize: bool = True
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2

    @property
    def patch_numbers(self) -> int:
        return 3 * self.temporal_patch_size * self.patch_size**2

    @property
    def values(self) -> np.ndarray:
        """[3, 256] float32: what each byte of a channel becomes, by the operations of transformers'
        PIL backend."""
        scaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        given = self.image_mean, self.image_std
        mean, std = (np.array(each, np.float32)[:, None] for each in given)
        values: np.ndarray = (scaled - mean) / std
        return values

    def patches(self, pixels: np.ndarray, values: np.ndarray) -> np.ndarray:
        """pixels [height, width, 3] uint8 → [patches, numbers of one] float32: squares of patches
        in order, and the same image at each time."""
        patch, merge = self.patch_size, self.merge_size
        rows, columns = (side // patch // merge for side in pixels.shape[:2])
        channels = np.stack([values[each][pixels[..., each]] for each in range(3)])
        squares = channels.reshape(3, rows, merge, patch, columns, merge, patch)
        ordered = squares.transpose(1, 4, 2, 5, 0, 3, 6)[:, :, :, :, :, None]
        shape = *ordered.shape[:5], self.temporal_patch_size, patch, patch
        return np.broadcast_to(ordered, shape).reshape(-1, self.patch_numbers)


def read_preprocessor(folder: Path) -> Preprocessor:
    """Raises ConfigError."""
    path = folder / PREPROCESSOR_FILE
    found = decode_json(path, Preprocessor)
    if not found.do_rescale or not found.do_normalize:
        raise ConfigError(f"model: {path}: images without do_rescale or do_normalize")
    return found


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
        model = _made_up(folder, dtype) if is_dummy else _loaded(folder, dtype)
        self.model = model.to(device)
        self._device = device
        # The memory of a stream is its own: features do not split the blocks of activations.
        self._stream, self._kept = (
            torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)
        )
        torch.backends.cudnn.allow_tf32 = False  # patches are embedded by a convolution

    @torch.inference_mode()
    def features(self, pixels: np.ndarray) -> Tensor:
        """[1, height, width, 3] uint8 → [tokens, hidden]. The result depends on nothing else. On a
        GPU it is made on a stream of its own, and the caller waits for it."""
        (frame,), patch = pixels, self._preprocessor.patch_size
        grid = np.array([[1, *(side // patch for side in frame.shape[:2])]])
        given = self._preprocessor.patches(frame, self._values), grid
        found: Tensor
        with torch.cuda.stream(self._stream):
            patches, sizes = (upload(each, self._device) for each in given)
            (found,) = self.model.get_image_features(patches, image_grid_thw=sizes).pooler_output
            DeviceEvent(self._device).wait()
        if self._kept is None:
            return found
        with torch.cuda.stream(self._kept):
            kept = found.clone()
            DeviceEvent(self._device).wait()
        return kept


class Sizes:
    """The bytes of a tower's ``weights``, ``of_patch`` those that it computes for a patch, and
    ``of_token`` those of features."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        with torch.device("meta"):
            model = _made_up(folder, dtype)
        vision = model.config.vision_config
        self.of_token = vision.out_hidden_size * dtype.itemsize
        states, inner = vision.hidden_size, vision.intermediate_size
        self.weights = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
        widest = STATES * states + max(ATTENTION * states, GATES * inner)
        preprocessor = read_preprocessor(folder)
        numbers = 2 * preprocessor.patch_numbers + widest
        self.of_patch = numbers * torch.float32.itemsize
        self.pixels_of_patch = preprocessor.patch_size**2
        self.patches_of_token = preprocessor.merge_size**2


def _loaded(folder: Path, dtype: torch.dtype) -> Any:
    load: Any = AutoModelForImageTextToText.from_pretrained
    with _quiet():
        model, report = load(folder, config=_config(folder), dtype=dtype, output_loading_info=True)
    missing = sorted(name for name in report["missing_keys"] if "visual." in name)
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
    config = AutoConfig.from_pretrained(folder)
    text = config.get_text_config()
    text.num_hidden_layers, text.layer_types = 0, []
    if hasattr(config, "quantization_config"):  # of texts
        del config.quantization_config
    return config


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

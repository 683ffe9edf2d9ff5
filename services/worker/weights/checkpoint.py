"""The tensors of a checkpoint by our names: safetensors files, which are mapped and read slice by
slice."""

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from services.worker.config.model_config import ModelConfig
from services.worker.models.registry import VIEWS
from shared.errors import ConfigError
from shared.model_folder import weight_files

log = logging.getLogger(__name__)

Transform = Callable[[Tensor], Tensor]
# Modules that read other files: ``tensors(file)``, by the end of the name.
READERS: dict[str, str] = {
    ".gguf": "services.worker.gguf.tensors",
}
# Modules that read the tensors of other frameworks ``by_our_names``, by the beginning of a name.
LAYOUTS: dict[str, str] = {
    "ernie.": "services.worker.paddle.layout",
}
TRUNK, TEXT_TRUNK, TEXT = "model.", "model.language_model.", "language_model."
SCORE = "score.weight"
IMAGES = (  # and sounds
    *("visual.", "vision_tower.", "multi_modal_projector.", "projector.", "mlp_AR."),
    *("vision_model.", "resampler_model.", "mm_projector.", "vision_encoder.", "merger.", "mlp1."),
    *("vision_projection.", "embed_vision.", "vision_embedder.", "audio_tower.", "embed_audio."),
)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. Only the parts requested from ``read`` are read, or all of it if there is
    a ``transform``."""

    file: Path
    name: str  # in the file
    slices: Any  # safetensors' view of it
    transform: Transform | None = None

    @property
    def shape(self) -> list[int]:
        shape: list[int] = self.slices.get_shape()
        if self.transform is None:
            return shape
        return list(self.transform(torch.empty(shape, device="meta")).shape)

    @cached_property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.slices[...].dtype
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def is_dense(self) -> bool:
        return self.dtype.is_floating_point and self.dtype.itemsize > 1

    @property
    def label(self) -> str:
        """The beginning of an error message, before the shape."""
        return f"tensor {self.name} is {self.dtype}"

    def read_all(self) -> Tensor:
        whole: Tensor = self.slices[...]
        return whole if self.transform is None else self.transform(whole)

    def read(self, dim: int, start: int, num: int) -> Tensor:
        """``num`` rows (``dim`` 0) or columns (1) from ``start`` on."""
        if self.transform is not None:
            return self.read_all().narrow(dim, start, num)
        part: Tensor = self.slices[(slice(None),) * dim + (slice(start, start + num),)]
        return part


Tensors = dict[str, StoredTensor]


class TensorSource(NamedTuple):
    """The stored tensor for one of our tensors, and the conversion between them."""

    name: str
    transform: Transform | None = None


class Checkpoint:
    """``tensors`` in ``folder`` by their names there. A subclass maps other names to ours."""

    def __init__(self, folder: Path, tensors: Tensors) -> None:
        self.folder = folder
        self.tensors = tensors

    def source(self, name: str) -> TensorSource:
        return TensorSource(name)

    def find(self, name: str) -> StoredTensor | None:
        """The tensor that is ``name`` with us."""
        source = self.source(name)
        tensor = self.tensors.get(source.name)
        return tensor and replace(tensor, transform=source.transform)


def open_checkpoint(files: list[Path]) -> Checkpoint:
    """Raises ConfigError for an invalid safetensors file, and for a name in two files."""
    tensors: Tensors = {}
    for file in files:
        for tensor in _tensors(file):
            first = tensors.setdefault(tensor.name, tensor)
            if first is not tensor:
                raise ConfigError(f"model: {first.file} and {file} both hold tensor {tensor.name}")
    folder = files[0].parent
    for beginning, module in LAYOUTS.items():
        if any(name.startswith(beginning) for name in tensors):
            tensors = import_module(module).by_our_names(folder, tensors)
    return Checkpoint(folder, tensors)


def _tensors(file: Path) -> Iterator[StoredTensor]:
    if file.suffix in READERS:
        yield from import_module(READERS[file.suffix]).tensors(file)
        return
    try:
        mapped: Any = safe_open(file, framework="pt")
        for name in mapped.keys():  # noqa: SIM118, not a mapping
            yield StoredTensor(file, name, mapped.get_slice(name))
    except SafetensorError as error:
        raise ConfigError(f"model: {file} is not a valid safetensors file: {error}") from None


class BareTrunk(Checkpoint):
    """The tensors of a trunk alone, with names that lack its prefix."""

    def source(self, name: str) -> TensorSource:
        return TensorSource(name.removeprefix(TRUNK))


def open_pooled(folder: Path) -> Checkpoint:
    """The checkpoint of a model that pools, without its head. Raises ConfigError."""
    checkpoint = open_checkpoint(weight_files(folder))
    tensors = {name: each for name, each in checkpoint.tensors.items() if name != SCORE}
    is_bare = not any(name.startswith(TRUNK) for name in tensors)
    return (BareTrunk if is_bare else Checkpoint)(checkpoint.folder, tensors)


class TextPart(Checkpoint):
    """The tensors of a model, without those for images. The text's are in the trunk, or it is a
    model within the model, or it has the names of a model of texts."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, tensors = checkpoint, checkpoint.tensors
        names = [each for each in tensors if not each.removeprefix(TRUNK).startswith(IMAGES)]
        super().__init__(checkpoint.folder, {name: tensors[name] for name in names})
        if num_left := len(tensors) - len(names):
            log.info("text: %d tensors for images are not part of it", num_left)
        self._is_in_trunk = any(name.startswith(TEXT_TRUNK) for name in names)
        self._is_within = any(name.startswith(TEXT) for name in names)

    def source(self, name: str) -> TensorSource:
        if self._is_within:
            name = TEXT + name
        elif self._is_in_trunk and name.startswith(TRUNK):
            name = TEXT_TRUNK + name.removeprefix(TRUNK)
        return self._checkpoint.source(name)


def with_our_names(checkpoint: Checkpoint, config: ModelConfig) -> Checkpoint:
    """``checkpoint`` by our names, if its family has others."""
    for name in config.architectures:
        if module := VIEWS.get(name):
            return cast(Checkpoint, import_module(module).view(TextPart(checkpoint), config))
    return TextPart(checkpoint)

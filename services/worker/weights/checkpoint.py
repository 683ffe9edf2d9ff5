"""Builds a model and fills it from safetensors files, which are mapped and never read whole.

Knows no architecture: each module declares which tensors of a checkpoint its parameters are made
of, by default one each under the parameter's own name; ``mtp_layouts`` adds those of MTP heads.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.linear import Dense, Piece
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model
from services.worker.weights.mtp_layouts import MappedTensor, MtpLayout, mtp_layout
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.model_folder import weight_files

# What checkpoints may hold beyond our parameters: the head of tied embeddings, and a buffer.
IGNORED = ("lm_head.weight", "rotary_emb.inv_freq")


@runtime_checkable
class HasPieces(Protocol):
    """A module whose parameters are made of other tensors than those of their names."""

    def checkpoint_pieces(self, name: str) -> dict[str, Piece]:
        """What fills the parameters, by its name beside this module's, which is ``name``."""


def load_model(
    folder: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress,
) -> DecoderLM:
    """The model of ``config`` with the folder's weights. Raises ConfigError naming the tensor."""
    model = build_model(config, dtype, device)
    fill(model, weight_files(folder), mtp_layout(config), progress)
    return model


def fill(model: nn.Module, files: list[Path], layout: MtpLayout | None, progress: Progress) -> None:
    """Copies every tensor of ``files`` to where it belongs; ``layout`` is that of an MTP head."""
    wanted = _destinations(model)
    lacking = set(wanted)
    num_bytes, done_bytes = sum(file.stat().st_size for file in files), 0
    for file in files:
        for name, tensor in _tensors(file):
            progress(f"loading {file.name}", done_bytes / num_bytes)
            done_bytes += tensor.nbytes
            ours = _as_ours(name, layout)
            if ours.is_copy:
                continue
            for piece in wanted.get(ours.name, ()):
                _copy(file, name, ours.transform(tensor), piece)
            if ours.name not in wanted and not ours.name.endswith(IGNORED):
                raise ConfigError(f"model: {file}: the architecture has no tensor {name}")
            lacking.discard(ours.name)
    if lacking:
        raise ConfigError(f"model: {files[0].parent} lacks {_some(sorted(lacking))}")
    progress("weights are loaded", 1.0)


def build_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderLM:
    """The model of ``config`` with parameters that hold nothing yet."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return find_model(config.architectures)(config)
    finally:
        torch.set_default_dtype(default)


def _destinations(model: nn.Module) -> dict[str, list[Piece]]:
    """What each tensor fills, by its name."""
    found: dict[str, list[Piece]] = {}
    for path, module in model.named_modules():
        for name, piece in _pieces(path, module):
            found.setdefault(name, []).append(piece)
    return found


def _pieces(path: str, module: nn.Module) -> Iterator[tuple[str, Piece]]:
    if isinstance(module, HasPieces):
        parent, _, own = path.rpartition(".")
        for name, piece in module.checkpoint_pieces(own).items():
            yield f"{parent}.{name}".lstrip("."), piece
    elif not isinstance(module, Dense):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", Piece(parameter)


def _as_ours(name: str, layout: MtpLayout | None) -> MappedTensor:
    of_head = layout.renamed(name) if layout else None
    return of_head or MappedTensor(name)


def _tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    try:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118, not a mapping
                yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        raise ConfigError(f"model: {file} is no good safetensors file: {error}") from None


def _copy(file: Path, name: str, tensor: Tensor, piece: Piece) -> None:
    shape = list(piece.destination.shape)
    shape[piece.dim] = piece.size or shape[piece.dim]
    if list(tensor.shape) != shape or not tensor.is_floating_point():
        raise ConfigError(
            f"model: {file}: tensor {name} is {tensor.dtype} {list(tensor.shape)};"
            f" the architecture has {shape} of floats"
        )
    num = piece.destination.shape[piece.dim]
    piece.destination.copy_(tensor.narrow(piece.dim, piece.start, num))


def _some(names: list[str], num: int = 5) -> str:
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return f"tensors {', '.join(names[:num])}{more}"

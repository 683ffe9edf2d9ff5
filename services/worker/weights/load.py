"""Builds a model and fills it from a checkpoint, of which only what the model needs is read.

Knows no architecture: each module declares which tensors of a checkpoint its parameters are made
of, by default one each under the parameter's own name; ``mtp_layouts`` adds those of MTP heads.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.linear import Linear, Piece
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.weights import FORMS, Dense, Quantization
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model
from services.worker.weights.checkpoint import Checkpoint, StoredTensor, Tensors, open_checkpoint
from services.worker.weights.mtp_layouts import with_mtp_head
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
    parallel: Parallel = ALONE,
    quantization: Quantization = "none",
) -> DecoderLM:
    """The model of ``config`` with the folder's weights, or a rank's shards of them. Raises
    ConfigError naming the tensor, or the size that cannot be split."""
    model = build_model(config, dtype, device, parallel)
    checkpoint = with_mtp_head(open_checkpoint(weight_files(folder)), config)
    fill(model, checkpoint, progress, quantization)
    return model


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: Parallel = ALONE
) -> DecoderLM:
    """The model of ``config`` with parameters that hold nothing yet."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            return find_model(config.architectures)(config, parallel)
    finally:
        torch.set_default_dtype(default)


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    progress: Progress,
    quantization: Quantization = "none",
) -> None:
    """Pulls what each module is made of, in the model's order, and quantises it before the next.
    Raises ConfigError before anything is read if the checkpoint has less, more or something
    else."""
    wanted = {module: dict(_pieces(path, module)) for path, module in model.named_modules()}
    names = list(dict.fromkeys(name for pieces in wanted.values() for name in pieces))
    found = {name: tensor for name in names if (tensor := checkpoint.find(name))}
    _check_names(checkpoint, names, found)
    every = [(found[name], piece) for pieces in wanted.values() for name, piece in pieces.items()]
    for tensor, piece in every:
        _check_kind(tensor, piece)
    num_bytes = sum(_num_bytes(tensor, piece) for tensor, piece in every)
    done_bytes = 0
    for module, pieces in wanted.items():
        for name, piece in pieces.items():
            tensor = found[name]
            progress(f"loading {tensor.file.name}", done_bytes / num_bytes)
            num = piece.destination.shape[piece.dim]
            piece.destination.copy_(tensor.read(piece.dim, piece.start, num))
            done_bytes += _num_bytes(tensor, piece)
        if isinstance(module, Linear):
            quantize(module, quantization)
    progress("weights are loaded", 1.0)


def quantize(linear: Linear, quantization: Quantization) -> None:
    """Gives ``linear``, which is filled, its weight in another form."""
    if quantization != "none":
        assert isinstance(linear.weight, Dense)
        linear.weight = FORMS[quantization](linear.weight.values)


def _pieces(path: str, module: nn.Module) -> Iterator[tuple[str, Piece]]:
    if isinstance(module, HasPieces):
        parent, _, own = path.rpartition(".")
        for name, piece in module.checkpoint_pieces(own).items():
            yield f"{parent}.{name}".lstrip("."), piece
    elif not isinstance(module, Dense):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", Piece(parameter)


def _check_names(checkpoint: Checkpoint, wanted: Iterable[str], found: Tensors) -> None:
    known = {tensor.name for tensor in found.values()}
    for name, tensor in checkpoint.tensors.items():
        if name not in known and not name.endswith(IGNORED):
            raise ConfigError(f"model: {tensor.file}: the architecture has no tensor {name}")
    if lacking := sorted(checkpoint.source(name).name for name in wanted if name not in found):
        raise ConfigError(f"model: {checkpoint.folder} lacks {_some(lacking)}")


def _check_kind(tensor: StoredTensor, piece: Piece) -> None:
    shape = list(piece.destination.shape)
    shape[piece.dim] = piece.size or shape[piece.dim]
    if tensor.shape != shape or not tensor.dtype.is_floating_point:
        raise ConfigError(
            f"model: {tensor.file}: tensor {tensor.name} is {tensor.dtype} {tensor.shape};"
            f" the architecture has {shape} of floats"
        )


def _num_bytes(tensor: StoredTensor, piece: Piece) -> int:
    """What is read for ``piece``."""
    return piece.destination.numel() * tensor.dtype.itemsize


def _some(names: list[str], num: int = 5) -> str:
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return f"tensors {', '.join(names[:num])}{more}"

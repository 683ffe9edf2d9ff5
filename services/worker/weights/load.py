"""Builds a model and fills it from a checkpoint, of which only what the model needs is read.

Knows no architecture: each module declares which tensors of a checkpoint its parameters are made
of, by default one each under the parameter's own name; ``mtp_layouts`` adds those of MTP heads, and
``schemes`` read what is quantised already.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.linear import Linear, Piece
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.weights import Dense, Quantized, are_alike, joined
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model
from services.worker.weights.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from services.worker.weights.code_cache import CodeCache
from services.worker.weights.mtp_layouts import with_mtp_head
from services.worker.weights.online import ONLINE, Quantization
from services.worker.weights.progress import Progress
from services.worker.weights.schemes import find_scheme
from services.worker.weights.schemes.scheme import Scheme, StoredCodes
from shared.errors import ConfigError
from shared.model_folder import weight_files

log = logging.getLogger(__name__)

# What checkpoints may hold beyond our parameters: the head of tied embeddings, and a buffer.
IGNORED = ("lm_head.weight", "rotary_emb.inv_freq")
# Scales of all keys, of all values …, found by calibration; our cache has finer ones.
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")


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
    cache: Path | None = None,
) -> DecoderLM:
    """The model of ``config`` with the folder's weights, or a rank's shards of them; dense ones are
    quantised, or read from the folder ``cache`` where they were before. Raises ConfigError naming
    the tensor, the size that cannot be split, or what of its quantization_config cannot be read."""
    scheme = find_scheme(config.quantization_config) if config.quantization_config else None
    if scheme is not None and quantization != "none":
        raise ConfigError(
            f"quantization: {quantization} is made of dense weights; those of {folder} are"
            " quantised already"
        )
    if scheme is not None:
        log.info("the weights are quantised already: %s", scheme)
    model = build_model(config, dtype, device, parallel)
    checkpoint = with_mtp_head(open_checkpoint(weight_files(folder)), config)
    if cache is None or quantization == "none" or parallel is not ALONE:
        fill(model, checkpoint, progress, quantization, scheme)
        return model
    codes = CodeCache(cache, folder, dtype, quantization)
    known = codes.read()
    fill(model, checkpoint, progress, quantization, known=known)
    if not known:
        codes.write(model)
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
    scheme: Scheme | None = None,
    known: Mapping[str, Quantized] | None = None,
) -> None:
    """Pulls what each module is made of, in the model's order, and quantises it before the next.
    Codes that are ``known``, by the paths of their layers, are taken instead. Raises ConfigError
    before anything is read if the checkpoint has less, more or something else."""
    modules = dict(model.named_modules())
    wanted = [each for path, module in modules.items() for each in _pieces(path, module)]
    names = list(dict.fromkeys(name for name, _ in wanted))
    found = {name: each for name in names if (each := find_layer(checkpoint, name, scheme))}
    _check_names(checkpoint, names, found, scheme)
    for name, piece in wanted:
        _check_kind(found[name], piece)
    num_bytes = sum(_num_bytes(found[name], piece) for name, piece in wanted)
    reading = _Reading(progress, num_bytes)
    for path, module in modules.items():
        _fill_module(path, module, found, reading, quantization, (known or {}).get(path))
    progress("weights are loaded", 1.0)


class _Reading:
    """Says how many of ``num_bytes`` are read."""

    def __init__(self, progress: Progress, num_bytes: int) -> None:
        self._progress = progress
        self._num_bytes = num_bytes
        self._done = 0

    def __call__(self, stored: StoredTensor | StoredCodes, piece: Piece) -> None:
        self._progress(f"loading {stored.file.name}", self._done / self._num_bytes)
        self._done += _num_bytes(stored, piece)


def _fill_module(
    path: str,
    module: nn.Module,
    found: Mapping[str, StoredTensor | StoredCodes],
    reading: _Reading,
    quantization: Quantization,
    known: Quantized | None,
) -> None:
    """Leaves nothing dense in memory of what is quantised."""
    if isinstance(module, Linear) and known is None:
        module.allocate()
    codes: list[tuple[Piece, Quantized]] = []
    for name, piece in _pieces(path, module):
        stored = found[name]
        reading(stored, piece)
        if known is not None and name.endswith(".weight"):
            continue
        num = piece.destination.shape[piece.dim]
        if isinstance(stored, StoredTensor):
            piece.destination.copy_(stored.read(piece.dim, piece.start, num))
        elif part := _read_codes(stored, piece):
            codes.append((piece, part))
    if known is not None:
        module.weight = known
    elif codes:
        _keep(module, codes)
    elif isinstance(module, Linear):
        quantize(module, quantization)


def quantize(linear: Linear, quantization: Quantization) -> None:
    """Gives ``linear``, which is filled, its weight in another form: each layer's of a checkpoint
    by itself."""
    if quantization != "none":
        assert isinstance(linear.weight, Dense)
        parts = linear.weight.values.split(linear.sizes)
        linear.weight = joined([ONLINE[quantization](part) for part in parts])


def _read_codes(stored: StoredCodes, piece: Piece) -> Quantized | None:
    """Returns the codes for ``piece``, or fills it where there are none of it alone."""
    num = piece.destination.shape[piece.dim]
    weight = stored.read(piece.destination.dtype)
    if isinstance(weight, Quantized) and (part := weight.part(piece.dim, piece.start, num)):
        return part
    piece.destination.copy_(weight.values.narrow(piece.dim, piece.start, num))
    return None


def _keep(module: nn.Module, codes: Sequence[tuple[Piece, Quantized]]) -> None:
    """Gives a product the codes where they are all of its weight and of one kind, and fills it with
    the numbers else."""
    parts = [each for _, each in codes]
    num_outputs = sum(len(each.codes) for each in parts)
    if isinstance(module, Linear) and num_outputs == module.outputs and are_alike(parts):
        module.weight = joined(parts).to(codes[0][0].destination.device)
        return
    for piece, each in codes:
        piece.destination.copy_(each.values)


def _pieces(path: str, module: nn.Module) -> Iterator[tuple[str, Piece]]:
    if isinstance(module, HasPieces):
        parent, _, own = path.rpartition(".")
        for name, piece in module.checkpoint_pieces(own).items():
            yield f"{parent}.{name}".lstrip("."), piece
    elif not isinstance(module, Dense):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", Piece(parameter)


def find_layer(
    checkpoint: Checkpoint, name: str, scheme: Scheme | None
) -> StoredTensor | StoredCodes | None:
    layer, _, own = name.rpartition(".")
    if scheme is not None and own == "weight":
        names = {suffix: checkpoint.find(f"{layer}.{suffix}") for suffix in scheme.suffixes}
        stored = {suffix: tensor for suffix, tensor in names.items() if tensor is not None}
        if scheme.holds(stored):
            return StoredCodes(layer, scheme, stored)
    return checkpoint.find(name)


def _check_names(
    checkpoint: Checkpoint,
    wanted: Iterable[str],
    found: Mapping[str, StoredTensor | StoredCodes],
    scheme: Scheme | None,
) -> None:
    known = {tensor.name for each in found.values() for tensor in _tensors(each)}
    for name, tensor in checkpoint.tensors.items():
        is_ignored = name.endswith(IGNORED + CACHE_SCALES) or (
            scheme is not None and scheme.ignores(tensor)
        )
        if name not in known and not is_ignored:
            raise ConfigError(f"model: {tensor.file}: the architecture has no tensor {name}")
    if any(name.endswith(CACHE_SCALES) for name in checkpoint.tensors):
        log.info(
            "the checkpoint's scales of keys and values are not used: kv-cache-dtype has its own"
        )
    if lacking := sorted(checkpoint.source(name).name for name in wanted if name not in found):
        raise ConfigError(f"model: {checkpoint.folder} lacks {_some(lacking)}")


def _check_kind(stored: StoredTensor | StoredCodes, piece: Piece) -> None:
    shape = list(piece.destination.shape)
    shape[piece.dim] = piece.size or shape[piece.dim]
    if stored.shape == shape and (isinstance(stored, StoredCodes) or stored.is_dense):
        return
    raise ConfigError(
        f"model: {stored.file}: {stored.label} {stored.shape};"
        f" the architecture has {shape} of floats"
    )


def _num_bytes(stored: StoredTensor | StoredCodes, piece: Piece) -> int:
    """What is read for ``piece``."""
    if isinstance(stored, StoredCodes):
        return stored.num_bytes
    return piece.destination.numel() * stored.dtype.itemsize


def _tensors(stored: StoredTensor | StoredCodes) -> Iterable[StoredTensor]:
    return stored.tensors.values() if isinstance(stored, StoredCodes) else [stored]


def _some(names: list[str], num: int = 5) -> str:
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return f"tensors {', '.join(names[:num])}{more}"

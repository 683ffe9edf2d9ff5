"""Builds a model and fills it from a checkpoint, of which only what the model needs is read.

Knows no architecture: each module declares which tensors of a checkpoint its parameters are made
of, by default one each under the parameter's own name; ``mtp_layouts`` adds those of MTP heads, and
``schemes`` read what is quantised already.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.linear import Linear, Piece
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.weights import Dense, Quantized, are_alike, joined
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model
from services.worker.weights.checkpoint import Checkpoint, StoredTensor, open_checkpoint
from services.worker.weights.code_cache import CodeCache
from services.worker.weights.homes import Homes
from services.worker.weights.mtp_layouts import with_mtp_head, without_missing_head
from services.worker.weights.online import ONLINE, Quantization
from services.worker.weights.progress import Progress
from services.worker.weights.schemes import find_scheme
from services.worker.weights.schemes.scheme import Scheme, StoredCodes
from shared.errors import ConfigError
from shared.model_folder import weight_files

log = logging.getLogger(__name__)

Read = Callable[[str, Piece], Tensor | Quantized]  # of what is stored by a name

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
    host_bytes: int = 0,
) -> DecoderLM:
    """The model of ``config`` with the folder's weights, or a rank's shards of them; dense ones are
    quantised, or read from the folder ``cache`` where they were before. At least ``host_bytes`` of
    them, if there are as many, are in the host's memory. Raises ConfigError naming the tensor, the
    size that cannot be split, or what of its quantization_config cannot be read."""
    scheme = find_scheme(config.quantization_config) if config.quantization_config else None
    if scheme is not None and quantization != "none":
        raise ConfigError(
            f"quantization: {quantization} is made of dense weights; those of {folder} are"
            " quantised already"
        )
    if scheme is not None:
        log.info("the weights are quantised already: %s", scheme)
    checkpoint = with_mtp_head(open_checkpoint(weight_files(folder)), config)
    model = build_model(without_missing_head(config, checkpoint), dtype, device, parallel)
    homes = Homes(model, device, model.model.layers, host_bytes)
    if cache is None or quantization == "none" or parallel is not ALONE:
        fill(model, checkpoint, progress, homes, quantization, scheme)
    else:
        codes = CodeCache(cache, folder, dtype, quantization)
        known = codes.read()
        fill(model, checkpoint, progress, homes, quantization, known=known)
        if not known:
            codes.write(model)
    model.offloaded = homes.offloaded()
    return model


def build_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, parallel: Parallel = ALONE
) -> DecoderLM:
    """The model of ``config`` with parameters that hold nothing yet, and no memory for the weights
    of linear layers, so that there is none where they become codes."""
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
    homes: Homes,
    quantization: Quantization = "none",
    scheme: Scheme | None = None,
    known: Mapping[str, Quantized] | None = None,
) -> None:
    """Pulls what each module is made of, in the model's order, and quantises it before the next:
    beside codes there are the numbers of one linear layer at most. Codes that are ``known``, by the
    paths of their layers, are taken instead. Raises ConfigError before anything is read if the
    checkpoint has less, more or something else."""
    wanted = {module: dict(_pieces(path, module)) for path, module in model.named_modules()}
    names = list(dict.fromkeys(name for pieces in wanted.values() for name in pieces))
    found = {name: each for name in names if (each := find_layer(checkpoint, name, scheme))}
    _check_names(checkpoint, names, found, scheme)
    every = [(found[name], piece) for pieces in wanted.values() for name, piece in pieces.items()]
    for stored, piece in every:
        _check_kind(stored, piece)
    num_bytes = sum(_num_bytes(stored, piece) for stored, piece in every)
    done_bytes = 0

    def read(name: str, piece: Piece) -> Tensor | Quantized:
        nonlocal done_bytes
        stored = found[name]
        progress(f"loading {stored.file.name}", done_bytes / num_bytes)
        done_bytes += _num_bytes(stored, piece)
        return _read(stored, piece)

    for path, module, home in homes.visit():
        if isinstance(module, Linear):
            of_codes = {name for name in wanted[module] if isinstance(found[name], StoredCodes)}
            device = home if quantization == "none" else homes.device
            _fill_linear(path, module, of_codes, read, device, (known or {}).get(path))
            if isinstance(module.weight, Dense):
                quantize(module, quantization)
            module.weight.to(home)
        else:
            for name, piece in wanted[module].items():
                _put(read(name, piece), piece)
    progress("weights are loaded", 1.0)


def _fill_linear(
    path: str,
    linear: Linear,
    of_codes: Set[str],
    read: Read,
    device: torch.device,
    known: Quantized | None,
) -> None:
    """Gives it codes where they are known, or all of its weight and of one kind; else the
    numbers."""
    pieces = dict(_pieces(path, linear))
    codes = {name: read(name, pieces[name]) for name in pieces if name in of_codes}
    parts = [each for each in codes.values() if isinstance(each, Quantized)]
    if parts and sum(len(each.codes) for each in parts) == linear.outputs and are_alike(parts):
        known = joined(parts)
    if known is None:
        linear.allocate(device)
        pieces = dict(_pieces(path, linear))
    else:
        linear.weight = known.to(device)
        pieces = {name: each for name, each in pieces.items() if not name.endswith(".weight")}
    for name, piece in pieces.items():
        _put(codes[name] if name in codes else read(name, piece), piece)


def quantize(linear: Linear, quantization: Quantization) -> None:
    """Gives ``linear``, which is filled, its weight in another form: each layer's of a checkpoint
    by itself."""
    if quantization != "none":
        assert isinstance(linear.weight, Dense)
        parts = linear.weight.values.split(linear.sizes)
        linear.weight = joined([ONLINE[quantization](part) for part in parts])


def _read(stored: StoredTensor | StoredCodes, piece: Piece) -> Tensor | Quantized:
    """What is ``piece``: codes where they can be cut as it wants, else numbers."""
    num = piece.destination.shape[piece.dim]
    if isinstance(stored, StoredTensor):
        return stored.read(piece.dim, piece.start, num)
    weight = stored.read(piece.destination.dtype)
    if isinstance(weight, Quantized) and (part := weight.part(piece.dim, piece.start, num)):
        return part
    return weight.values.narrow(piece.dim, piece.start, num)


def _put(found: Tensor | Quantized, piece: Piece) -> None:
    piece.destination.copy_(found.values if isinstance(found, Quantized) else found)


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

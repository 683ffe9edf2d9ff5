"""Builds a model and fills it from a checkpoint; only the tensors that the model needs are read.

Knows no architecture: each module declares the checkpoint tensors of its parameters, by default one
each under the parameter's own name; ``mtp_layouts`` adds the tensors of MTP heads, and ``schemes``
read weights that are already quantized.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from services.worker.config.model_config import ModelConfig
from services.worker.layers.embedding import LMHead, TokenRows
from services.worker.layers.linear import Linear, WeightPiece
from services.worker.layers.parallel import ALONE, Parallel, cannot_split
from services.worker.layers.weights import Dense, Quantized, Weight, are_alike, joined
from services.worker.models.decoder import DecoderLM
from services.worker.models.registry import find_model
from services.worker.weights.cache.code_cache import CodeCache
from services.worker.weights.check_tensors import check_form, check_kind, check_names
from services.worker.weights.checkpoint import (
    Checkpoint,
    StoredTensor,
    open_checkpoint,
    open_pooled,
    with_our_names,
)
from services.worker.weights.mtp_layouts import with_mtp_head, without_missing_head
from services.worker.weights.online import DENSE, FP8_BLOCK, ONLINE, Forms, KnownCodes, Quantization
from services.worker.weights.progress import Progress
from services.worker.weights.schemes import find_scheme
from services.worker.weights.schemes.scheme import Scheme, StoredCodes
from services.worker.weights.stacked_experts import with_experts
from services.worker.weights.weight_placement import WeightPlacement, make_placement
from shared.errors import ConfigError
from shared.model_folder import weight_files

log = logging.getLogger(__name__)

Read = Callable[[str, WeightPiece], Tensor | Quantized]  # reads a stored tensor by name


@runtime_checkable
class HasPieces(Protocol):
    """A module whose parameters are made from tensors with other names."""

    def checkpoint_pieces(self, name: str) -> dict[str, WeightPiece]:
        """The pieces for the parameters of this module (``name``), by their checkpoint names."""


CACHES: tuple[type[KnownCodes], ...] = (
    CodeCache,
    KnownCodes,
)
"""The first one is used."""


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
    *,
    head: Quantization = "none",
    embedding: Quantization = "none",
    pools: bool = False,
) -> DecoderLM:
    """The model of ``config`` with the folder's weights, or a rank's shards of them, without its
    heads if it ``pools``. Dense weights are quantized, also in its ``head`` and ``embedding``, or
    read from the folder ``cache`` if they were quantized before. At least ``host_bytes`` of them,
    or all if there are fewer, are in host memory. Raises ConfigError naming the tensor, the size
    that cannot be split, or the unreadable part of its quantization_config."""
    scheme = find_scheme(config.quantization_config) if config.quantization_config else None
    if scheme is not None and quantization != "none":
        raise ConfigError(
            f"quantization: {quantization} is made of dense weights; those of {folder} are"
            " quantised already"
        )
    if scheme is not None:
        log.info("the weights are quantised already: %s", scheme)
    forms = Forms(quantization, head, embedding).tied(bool(config.tie_word_embeddings))
    stored = open_pooled(folder) if pools else open_checkpoint(weight_files(folder))
    stored = with_our_names(stored, config)
    checkpoint = with_experts(with_mtp_head(stored, config), config)
    own = without_missing_head(config, checkpoint)
    model = build_model(own, dtype, device, parallel, pools=pools)
    placement = make_placement(model, device, model.model.layers, host_bytes)
    if cache is not None and (scheme is not None or parallel is not ALONE):
        log.warning("quantization-cache: not used with ranks, nor where codes are read")
    if cache is None or forms == DENSE or scheme is not None or parallel is not ALONE:
        remote = {each for part in model.remote_modules() for each in part.modules()}
        fill(model, checkpoint, progress, placement, forms, scheme, remote=remote)
        model.drop_remote()
    else:
        codes = CACHES[0](cache, folder, dtype, forms)
        known = codes.read()
        fill(model, checkpoint, progress, placement, forms, known=known)
        if not known:
            codes.write(model)
    model.offloaded = placement.offloaded()
    return model


def build_model(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    parallel: Parallel = ALONE,
    *,
    pools: bool = False,
) -> DecoderLM:
    """The model of ``config`` with uninitialized parameters, and no memory for the weights of
    linear layers, because these may become codes."""
    with laid_out(dtype, device):
        model = find_model(config.architectures)(config, parallel)
    if pools:
        model.drop_heads()
    return model


@contextmanager
def laid_out(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Modules that are made within it have parameters of this type there."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(default)


def fill(
    model: nn.Module,
    checkpoint: Checkpoint,
    progress: Progress,
    placement: WeightPlacement,
    forms: Forms = DENSE,
    scheme: Scheme | None = None,
    known: Mapping[str, Quantized] | None = None,
    remote: Set[nn.Module] = frozenset(),
) -> None:
    """Reads the tensors of each module, in the model's order, and quantizes it before the next:
    next to the codes, memory holds the values of one layer at most. ``known`` codes, by the paths
    of their layers, are used instead, and modules ``remote`` get nothing. Raises ConfigError
    before anything is read if the checkpoint has fewer, more or different tensors."""
    wanted = {module: dict(_pieces(path, module)) for path, module in model.named_modules()}
    names = list(dict.fromkeys(name for pieces in wanted.values() for name in pieces))
    found = {name: each for name in names if (each := find_layer(checkpoint, name, scheme))}
    check_names(checkpoint, names, found, scheme)
    wanted = {module: pieces for module, pieces in wanted.items() if module not in remote}
    every = [(found[name], piece) for pieces in wanted.values() for name, piece in pieces.items()]
    for stored, piece in every:
        check_kind(stored, piece)
    for module, pieces in wanted.items():
        check_form(module, [found[name] for name in pieces], forms)
    num_bytes = sum(_num_bytes(stored, piece) for stored, piece in every)
    done_bytes = 0
    tables: dict[str, Weight] = {}  # embeddings, by their checkpoint tensor

    def read(name: str, piece: WeightPiece) -> Tensor | Quantized:
        nonlocal done_bytes
        stored = found[name]
        progress(f"loading {stored.file.name}", min(1.0, done_bytes / num_bytes))
        done_bytes += _num_bytes(stored, piece)
        return _read(stored, piece)

    for path, module, home in placement.visit():
        if module in remote:
            continue
        if isinstance(module, Linear) and module.is_empty:
            module.allocate(placement.device)
        elif isinstance(module, Linear):
            of_codes = {name for name in wanted[module] if isinstance(found[name], StoredCodes)}
            device = home if forms.linear == "none" else placement.device
            of_layer = (known or {}).get(path)
            if forms.linear != "none" and module.is_shard and of_layer is None:
                of_layer = _quantized_shard(wanted[module], read, device, forms.linear)
            _fill_linear(path, module, of_codes, read, device, of_layer)
            if isinstance(module.weight, Dense):
                quantize(module, forms.linear)
            module.weight.to(home)
        elif isinstance(module, TokenRows):
            (name,) = wanted[module]
            of_table = tables.get(name) if forms.of(module) == forms.embedding else None
            if isinstance(module, LMHead) and of_table and module.can_have(of_table):
                module.weight = of_table
            else:
                codes = (known or {}).get(path)
                module.weight = _rows(module, name, read, home, forms.of(module), codes)
                tables[name] = module.weight
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
    """Fills it with known codes, or with stored codes if all parts have them in one form; else with
    values."""
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


def _rows(
    rows: TokenRows,
    name: str,
    read: Read,
    device: torch.device,
    quantization: Quantization,
    known: Quantized | None,
) -> Weight:
    """Codes if they are known, requested or stored, else values."""
    ((_, piece),) = rows.checkpoint_pieces(name).items()
    if known is not None:
        return known.to(device)
    if quantization != "none":
        return _quantized_rows(name, piece, read, device, quantization)
    found = read(name, piece)
    if isinstance(found, Quantized) and found.order is None:
        is_shard = rows.vocab.num < rows.vocab.total  # its memory is the memory of all rows
        return (joined([found]) if is_shard else found).to(device)
    rows.allocate(device)
    _put(found, piece._replace(destination=rows.weight.values))
    return rows.weight


def _quantized_rows(
    name: str, piece: WeightPiece, read: Read, device: torch.device, quantization: Quantization
) -> Quantized:
    """A rank's rows of one process's weights: rows that share scales with its first and last row
    are quantized too."""
    (num, inputs), dtype = piece.destination.shape, piece.destination.dtype
    first = piece.start // FP8_BLOCK * FP8_BLOCK
    end = min(piece.size or num, -(-(piece.start + num) // FP8_BLOCK) * FP8_BLOCK)
    rows = torch.empty(end - first, inputs, dtype=dtype, device="meta")
    dense = read(name, WeightPiece(rows, 0, first, piece.size))
    assert isinstance(dense, Tensor)
    part = ONLINE[quantization](dense.to(device, dtype)).part(0, piece.start - first, num)
    assert part is not None  # all of each row
    return part


def _quantized_shard(
    pieces: Mapping[str, WeightPiece], read: Read, device: torch.device, quantization: Quantization
) -> Quantized:
    """Whole layers are quantized, one at a time, and then cut: ranks have the weights of one
    process."""
    parts = []
    for name, piece in pieces.items():
        if name.endswith(".weight"):
            dtype = piece.destination.dtype
            dense = read(name, WeightPiece(torch.empty(piece.whole, dtype=dtype, device="meta")))
            assert isinstance(dense, Tensor)
            whole = ONLINE[quantization](dense.to(device, dtype))
            parts.append(_part(name, whole, piece))
    return joined(parts)


def quantize(layer: Linear | TokenRows, quantization: Quantization) -> None:
    """Gives ``layer``, which is filled, its weight in another form: each layer's of a checkpoint
    by itself."""
    if quantization != "none":
        assert isinstance(layer.weight, Dense)
        parts = layer.weight.values.split(layer.sizes)
        layer.weight = joined([ONLINE[quantization](part) for part in parts])


def _read(stored: StoredTensor | StoredCodes, piece: WeightPiece) -> Tensor | Quantized:
    """The content of ``piece``: codes if they can be cut as it requires, else values."""
    num = piece.destination.shape[piece.dim]
    if isinstance(stored, StoredTensor) and piece.rows is not None:
        return stored.read_all()[torch.from_numpy(piece.rows)]
    if isinstance(stored, StoredTensor):
        return stored.read(piece.dim, piece.start, num)
    weight = stored.read(piece.destination.dtype)
    if piece.rows is not None:
        rows = weight.rows(torch.from_numpy(piece.rows))
        return rows if isinstance(rows, Quantized) else rows.values
    if isinstance(weight, Quantized):
        part = weight.part(piece.dim, piece.start, num)
        if part is not None or piece.num_ranks > 1:
            return part or _part(stored.layer, weight, piece)
    return weight.values.narrow(piece.dim, piece.start, num)


def _part(name: str, whole: Quantized, piece: WeightPiece) -> Quantized:
    """A rank's part, or some rows. Raises ConfigError if it would begin or end within a group."""
    if piece.rows is not None:
        return whole.rows(torch.from_numpy(piece.rows))
    part = whole.part(piece.dim, piece.start, piece.destination.shape[piece.dim])
    if part is not None:
        return part
    inputs, group = whole.shape[1], whole.group
    if whole.order is not None:
        raise cannot_split(
            f"{name}: inputs in an order of their own (desc_act)", piece.num_ranks, lambda n: n == 1
        )
    raise cannot_split(
        f"{name}: {inputs} inputs of which {group} share a scale",
        piece.num_ranks,
        lambda n: (inputs % n == 0 and inputs // n % group == 0) or n == 1,
    )


def _put(found: Tensor | Quantized, piece: WeightPiece) -> None:
    piece.destination.copy_(found.values if isinstance(found, Quantized) else found)
    if piece.offset:
        piece.destination.add_(piece.offset)


def _pieces(path: str, module: nn.Module) -> Iterator[tuple[str, WeightPiece]]:
    if isinstance(module, HasPieces):
        parent, _, own = path.rpartition(".")
        for name, piece in module.checkpoint_pieces(own).items():
            yield f"{parent}.{name}".lstrip("."), piece
    elif not isinstance(module, Dense):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{path}.{name}", WeightPiece(parameter)


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


def _num_bytes(stored: StoredTensor | StoredCodes, piece: WeightPiece) -> int:
    """The number of bytes read for ``piece``."""
    if isinstance(stored, StoredCodes):
        return stored.num_bytes if piece.destination.numel() else 0
    return piece.destination.numel() * stored.dtype.itemsize

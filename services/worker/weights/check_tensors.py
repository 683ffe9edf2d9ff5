"""Checks of a checkpoint's tensors against those of a model, before anything is read."""

import logging
from collections.abc import Iterable, Mapping

from torch import nn

from services.worker.layers.embedding import LMHead, TokenRows
from services.worker.layers.linear import WeightPiece
from services.worker.weights.checkpoint import Checkpoint, StoredTensor
from services.worker.weights.online import Forms
from services.worker.weights.schemes.scheme import Scheme, StoredCodes
from shared.errors import ConfigError

log = logging.getLogger(__name__)

# Extra tensors that checkpoints may hold: the head of tied embeddings, and a buffer.
IGNORED = ("lm_head.weight", "rotary_emb.inv_freq")
# Scales of all keys, of all values …, found by calibration; our cache has finer ones.
CACHE_SCALES = (".k_scale", ".v_scale", ".kv_scale", ".q_scale", ".prob_scale")


def check_names(
    checkpoint: Checkpoint,
    wanted: Iterable[str],
    found: Mapping[str, StoredTensor | StoredCodes],
    scheme: Scheme | None,
) -> None:
    """Raises ConfigError if a tensor is unknown or missing."""
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


def check_kind(stored: StoredTensor | StoredCodes, piece: WeightPiece) -> None:
    """Raises ConfigError for another shape or type."""
    shape = piece.whole
    if stored.shape == shape and (isinstance(stored, StoredCodes) or stored.is_dense):
        return
    raise ConfigError(
        f"model: {stored.file}: {stored.label} {stored.shape};"
        f" the architecture has {shape} of floats"
    )


def check_form(
    module: nn.Module, parts: Iterable[StoredTensor | StoredCodes], forms: Forms
) -> None:
    """Raises ConfigError if codes would be quantized again."""
    if not isinstance(module, TokenRows) or forms.of(module) == "none":
        return
    setting = "lm-head" if isinstance(module, LMHead) else "embedding"
    for stored in parts:
        if isinstance(stored, StoredCodes):
            raise ConfigError(
                f"{setting}-quantization: {forms.of(module)} is made of dense weights; those of"
                f" {stored.layer} are quantised already"
            )


def _tensors(stored: StoredTensor | StoredCodes) -> Iterable[StoredTensor]:
    return stored.tensors.values() if isinstance(stored, StoredCodes) else [stored]


def _some(names: list[str], num: int = 5) -> str:
    more = f" and {len(names) - num} more" if len(names) > num else ""
    return f"tensors {', '.join(names[:num])}{more}"

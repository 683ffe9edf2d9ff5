"""A backend's requirements on a model, independent of its operators."""

from collections.abc import Set
from dataclasses import MISSING, fields

from services.worker.layers.attention import Attention
from services.worker.layers.heads import AttentionSpec, LatentSpec
from services.worker.layers.latent import LatentAttention
from services.worker.layers.ops import NotSupported
from services.worker.models.decoder import DecoderLM

ON_DEVICES = frozenset({"norm", "is_interleaved", "window", "softcap", "has_sinks", "is_causal"})
ON_HOSTS = ON_DEVICES | {"index_topk"}


def check_model(model: DecoderLM, known: Set[str]) -> None:
    """Raises NotSupported, with the layer's name, for an attention option that is not ``known``."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            _check_options(name, module.heads.spec, known)
        if isinstance(module, LatentAttention):
            _check_options(name, module.latents.spec, known)


def _check_options(name: str, spec: AttentionSpec | LatentSpec, known: Set[str]) -> None:
    if unknown := _set_options(spec) - known:
        raise NotSupported(f"{name}: attention's options {', '.join(sorted(unknown))}")


def _set_options(spec: AttentionSpec | LatentSpec) -> set[str]:
    """Names of options that differ from their defaults."""
    return {
        field.name
        for field in fields(spec)
        if field.default is not MISSING and getattr(spec, field.name) != field.default
    }

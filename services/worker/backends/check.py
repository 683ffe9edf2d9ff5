"""What a backend must know of a model, whatever its operators are."""

from collections.abc import Set
from dataclasses import MISSING, fields

from services.worker.layers.attention import Attention
from services.worker.layers.embedding import LMHead
from services.worker.layers.heads import AttentionSpec
from services.worker.layers.linear import Dense, Linear
from services.worker.layers.ops import NotSupported
from services.worker.models.decoder import DecoderLM


def check_model(model: DecoderLM, known_options: Set[str]) -> None:
    """Raises NotSupported, with the layer's name, where attention has an option that is not among
    ``known_options``, weights have a form that no backend takes yet, or a product is a part of a
    sum over ranks."""
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            unknown = _set_options(module.heads.spec) - known_options
            if unknown:
                raise NotSupported(f"{name}: attention's options {', '.join(sorted(unknown))}")
        if isinstance(module, Linear) and module.is_partial:
            raise NotSupported(f"{name}: a part of a sum over ranks")
        if isinstance(module, Linear | LMHead) and not isinstance(module.weight, Dense):
            kind = type(module.weight).__name__
            raise NotSupported(f"{name}: weights in the form {kind}")


def _set_options(spec: AttentionSpec) -> set[str]:
    """Names of what differs from its default."""
    return {
        field.name
        for field in fields(spec)
        if field.default is not MISSING and getattr(spec, field.name) != field.default
    }

"""Tensors of Paddle's folders by our names, as views: matrices are stored [inputs, outputs], those
of queries, keys and values as one, and those of gates and ups.

After PaddlePaddle/ERNIE, ``tools/paddle2torch``.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from services.worker.weights.checkpoint import StoredTensor, Tensors
from shared.errors import ConfigError
from shared.model_folder import CONFIG_FILE, decode_json

TRUNK, OURS = "ernie.", "model."
QKV, GATE_UP = ".qkv_proj.", ".up_gate_proj."
TABLE, HEAD = "embed_tokens.weight", "lm_head.weight"


class Sizes(Struct):
    """The places of parts and the form of the head depend on it."""

    num_attention_heads: int
    num_key_value_heads: int
    tie_word_embeddings: bool = True
    vision_config: dict[str, Any] | None = None
    quantization_config: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """``num`` outputs of a stored tensor from ``start`` on, indexed like safetensors' views.

    Outputs are the last dimension of a tensor that ``is_turned``, else the first. Integers are the
    bits of bfloat16.
    """

    slices: Any
    start: int
    num: int
    is_turned: bool

    def get_shape(self) -> list[int]:
        shape = self.slices.get_shape()
        return [self.num, *(reversed(shape[:-1]) if self.is_turned else shape[1:])]

    def __getitem__(self, index: Any) -> Tensor:
        index = (slice(None),) if index is Ellipsis else index
        rows, *columns = index if isinstance(index, tuple) else (index,)
        first, last, _ = rows.indices(self.num)
        outputs = slice(self.start + first, self.start + last)
        if self.is_turned:
            return _as_floats(self.slices[(*(columns or [slice(None)]), outputs)]).T
        return _as_floats(self.slices[(outputs, *columns)])


def by_our_names(folder: Path, tensors: Tensors) -> Tensors:
    """``tensors`` of ``folder``. Raises ConfigError."""
    config = decode_json(folder / CONFIG_FILE, Sizes)
    for key in ("quantization_config", "vision_config"):
        if getattr(config, key):
            raise ConfigError(
                f"model: {folder / CONFIG_FILE}: {key} is not supported for Paddle's weights; dense"
                " weights of texts are, and folders with weights of torch"
            )
    found = (each for tensor in tensors.values() for each in _parts(tensor, config))
    return {each.name: each for each in found}


def _parts(stored: StoredTensor, config: Sizes) -> Iterator[StoredTensor]:
    name, shape = stored.name.replace(TRUNK, OURS, 1), stored.shape
    is_turned = len(shape) == 2 and _is_turned(name, config)
    if not shape:
        yield replace(stored, name=name)
        return
    num = shape[-1] if is_turned else shape[0]
    if QKV in name:
        heads, own = config.num_attention_heads, config.num_key_value_heads
        size, rest = divmod(num, heads + 2 * own)
        cuts = {".q_proj.": heads * size, ".k_proj.": own * size, ".v_proj.": own * size}
        joined, unit = QKV, f"num_attention_heads {heads} + 2 · num_key_value_heads {own}"
    elif GATE_UP in name:
        size, rest = divmod(num, 2)
        cuts = {".gate_proj.": size, ".up_proj.": size}
        joined, unit = GATE_UP, "2"
    else:
        yield replace(stored, name=name, slices=Part(stored.slices, 0, num, is_turned))
        return
    if rest:
        raise ConfigError(
            f"model: {stored.file}: tensor {stored.name} has {num} outputs, no multiple of {unit}"
        )
    start = 0
    for part, size in cuts.items():
        slices = Part(stored.slices, start, size, is_turned)
        yield replace(stored, name=name.replace(joined, part), slices=slices)
        start += size


def _is_turned(name: str, config: Sizes) -> bool:
    if name == HEAD:
        return not config.tie_word_embeddings
    return name.endswith(".weight") and not name.endswith(TABLE)


def _as_floats(values: Tensor) -> Tensor:
    return values.view(torch.bfloat16) if values.dtype == torch.uint16 else values

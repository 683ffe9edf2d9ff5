"""Parts of several tools' formats: words of codes, scales, and keys of a config."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def unpack(words: Tensor, bits: int) -> Tensor:
    """words [..., n], with 32 used bits each → their codes, lowest bits first:
    [..., n · 32 / bits] uint8."""
    shifts = torch.arange(0, 32, bits, dtype=words.dtype)
    codes = words[..., None] >> shifts & (1 << bits) - 1
    return codes.to(torch.uint8).flatten(-2)


def blocks_of(scales: Tensor, shape: list[int], block: list[int]) -> Tensor:
    """scales of blocks [⌈outputs / rows⌉, ⌈inputs / columns⌉] → [outputs, ⌈inputs / columns⌉].
    Raises ValueError if there are more or fewer."""
    wanted = [-(-size // each) for size, each in zip(shape, block, strict=True)]
    if list(scales.shape) != wanted:
        raise ValueError(f"scales {list(scales.shape)} for blocks of {block}, which are {wanted}")
    return scales.float().repeat_interleave(block[0], 0)[: shape[0]]


def per_output(scales: Tensor, outputs: int) -> Tensor:
    """scales [outputs] or [outputs, 1], or one of all → [outputs, 1] float32."""
    if scales.numel() not in (1, outputs):
        raise ValueError(f"scales {list(scales.shape)} for {outputs} outputs")
    return scales.float().reshape(-1, 1).expand(outputs, 1)


def refuse_unless(config: Mapping[str, Any], key: str, known: tuple[Any, ...]) -> Any:
    """Returns the value, by default the first ``known`` one. Raises ValueError."""
    value = config.get(key, known[0])
    if value not in known:
        raise ValueError(f"{key} {value!r} is not supported; supported are {list(known)}")
    return value

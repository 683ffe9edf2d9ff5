"""torchao, as it flattens its tensors into safetensors files (``flatten_tensor_state_dict``)."""

import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from services.worker.layers.weights import Weight
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.schemes.scheme import Scheme, Stored, whole_numbers
from services.worker.weights.schemes.tools.fp8 import fp8
from services.worker.weights.schemes.tools.parts import blocks_of
from shared.errors import ConfigError

CODES = "_weight_qdata"
UNPACKED, PAIRS, TILES = "IntxUnpackedToInt8Tensor", "Int4Tensor", "Int4TilePackedTo4dTensor"
KINDS = ("Float8Tensor", "Int8Tensor", UNPACKED, PAIRS, TILES)
SHORT = [{"_type": "torch.dtype", "_data": f"int{bits}"} for bits in range(1, 5)]
# Of a tile of Int4TilePackedTo4dTensor.
TILE_OUTPUTS, TILE_INPUTS = 8, 128


class TorchAo(Scheme):
    """The file's metadata name the class of each weight, whose parts are tensors.

    ``qdata`` [outputs, inputs] float8_e4m3fn or int8 has a ``scale`` for each block, and int8 a
    ``zero_point``. Codes of four bits −8 … 7 are two in a byte, the first one in its lower half,
    with values code · scale + zero_point of [groups, outputs]; or they are in tiles, with
    ``scale_and_zero`` [groups, outputs, 2]. Activations are not quantized.
    """

    suffixes = (
        CODES,
        *(f"_weight_{each}" for each in ("scale", "zero_point", "scale_and_zero", "act_pre_scale")),
        *("_weight_act_quant_scale", "_weight_act_quant_zero_point"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._metadata = cache(_metadata)  # of each file

    def num_bytes(self, tensors: Iterable[StoredTensor], dtype: torch.dtype) -> int:
        return sum(each.num_bytes // (2 if self._is_unpacked(each) else 1) for each in tensors)

    def holds(self, stored: Stored) -> bool:
        return CODES in stored

    def shape(self, stored: Stored) -> list[int]:
        codes = stored[CODES]
        kind, values = self._described(codes)
        if kind not in KINDS:
            raise ValueError(f"{kind} is not supported; supported are {list(KINDS)}")
        if kind not in (PAIRS, TILES):
            return codes.shape
        shape: list[int] = values["shape"]
        if kind == TILES:
            tiles, parts, *_ = codes.shape
            padded = [tiles * TILE_OUTPUTS, parts * TILE_INPUTS]
            if padded != shape:
                raise ValueError(f"{kind} {shape} is filled up to {padded}, which is not supported")
        return shape

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        parts = {name.removeprefix("_weight_"): each for name, each in tensors.items()}
        if "act_pre_scale" in parts:
            raise ValueError("act_pre_scale, a factor of activations, is not supported")
        codes = parts["qdata"]
        if codes.ndim == 4:
            scales, zeros = tensors["_weight_scale_and_zero"].permute(2, 1, 0)
            return _shifted(_from_tiles(codes), scales, zeros, dtype)
        scales, zeros = tensors["_weight_scale"], parts.get("zero_point")
        if zeros is not None and zeros.is_floating_point():
            halves = torch.stack((codes & 15, codes >> 4 & 15), -1).flatten(1)
            return _shifted((halves ^ 8) - 8, scales.T, zeros.T, dtype)
        shape = [*codes.shape]
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        if scales.ndim != 2 or not scales.numel():
            raise ValueError(f"scales {list(scales.shape)} for codes {shape}")
        block = [size // num for size, num in zip(shape, scales.shape, strict=True)]
        if codes.is_floating_point():
            return fp8(codes, scales, block, dtype)
        is_short = bool(codes.min() >= -8 and codes.max() <= 7)
        return whole_numbers(
            codes,
            4 if is_short else 8,
            blocks_of(scales, shape, block),
            None if zeros is None else blocks_of(zeros.reshape(scales.shape), shape, block),
            dtype,
            group=block[1],
        )

    def _described(self, codes: StoredTensor) -> tuple[str, Mapping[str, Any]]:
        """Class and attributes of the weight that has ``codes``. Raises ConfigError if the file
        lacks them."""
        name = f"{codes.name.removesuffix(CODES)}weight"
        try:
            found = json.loads(self._metadata(codes.file)[name])
            return found["_type"], dict(found["_data"])
        except (KeyError, TypeError, ValueError):
            raise ConfigError(
                f"model: {codes.file}: no metadata of torchao describe {name}"
            ) from None

    def _is_unpacked(self, tensor: StoredTensor) -> bool:
        """True for codes of at most four bits in a byte each."""
        if not tensor.name.endswith(CODES):
            return False
        kind, values = self._described(tensor)
        return kind == UNPACKED and values.get("target_dtype") in SHORT


def _metadata(file: Path) -> Mapping[str, str]:
    with safe_open(file, framework="pt") as content:
        return content.metadata() or {}


def _from_tiles(words: Tensor) -> Tensor:
    """words [outputs / 8, inputs / 128, 32, 4] int32 → codes [outputs, inputs] from −8 on.

    An output has four lanes in the third dimension. Word i of a lane has inputs 32 i + 8 j +
    2 lane, j = 0 … 3, in its lower half, and the ones behind these in its upper half.
    """
    codes = words[..., None] >> torch.arange(0, 32, 4) & 15
    codes = codes.unflatten(2, (TILE_OUTPUTS, 4)).unflatten(-1, (2, 4))
    # […, output, lane, i, upper, j]
    rows: Tensor = codes.permute(0, 2, 1, 4, 6, 3, 5).flatten(2).flatten(0, 1)
    return (rows - 8).to(torch.int8)


def _shifted(codes: Tensor, scales: Tensor, offsets: Tensor, dtype: torch.dtype) -> Weight:
    """codes · scales + offsets, whose zeros are rounded to float32."""
    group = codes.shape[1] // scales.shape[1]
    scales = scales.float()
    return whole_numbers(codes, 4, scales, -offsets.float() / scales, dtype, group=group)


SCHEME = TorchAo

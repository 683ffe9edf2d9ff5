"""Quark of AMD, as it exports folders for Hugging Face (``pack_method`` does not matter here)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Weight
from services.worker.weights.schemes.scheme import (
    Scheme,
    Stored,
    per_output,
    refuse_unless,
    whole_numbers,
)
from services.worker.weights.schemes.tools.fp8 import fp8
from services.worker.weights.schemes.tools.mxfp4 import GROUP, mxfp4
from shared.errors import ConfigError

# Further values of a weight, by its dtype and qscheme.
FORMS: dict[tuple[str, str], dict[str, Any]] = {
    ("fp8_e4m3", "per_tensor"): {},
    ("fp8_e4m3", "per_channel"): {"ch_axis": 0},
    ("int8", "per_tensor"): {},
    ("int8", "per_channel"): {"ch_axis": 0},
    ("fp4", "per_group"): {"ch_axis": -1, "group_size": GROUP, "scale_format": "e8m0"},
}
CACHE_DTYPES = {"fp8_e4m3": "fp8", "int8": "int8"}


class Quark(Scheme):
    """``weight`` [outputs, inputs] float8_e4m3fn or int8 with ``weight_scale`` of all or of an
    output; or MXFP4, two codes in a byte [outputs, inputs / 2], the first one in its lower half.
    Activations are not quantized."""

    suffixes = (
        *("weight", "weight_scale", "weight_zero_point"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        stored_as = config.get("export", {}).get("weight_format", "real_quantized")
        if stored_as != "real_quantized":
            raise ValueError(f"weight_format {stored_as!r} is not supported; 'real_quantized' is")
        layers = [config.get("global_quant_config") or {}]
        for key in ("layer_quant_config", "layer_type_quant_config"):
            layers += (config.get(key) or {}).values()
        for layer in layers:
            if (weight := layer.get("weight")) is not None:
                _check_form(weight)

    def cache_dtype(self) -> str:
        found = {
            each["dtype"]
            for layer in (self.config.get("kv_cache_quant_config") or {}).values()
            if (each := layer.get("output_tensors"))
        }
        for dtype in found - CACHE_DTYPES.keys():
            raise ConfigError(
                f"kv-cache-dtype: auto: the checkpoint's kv_cache_quant_config has dtype {dtype!r};"
                f" supported are {list(CACHE_DTYPES)}: set none, int8 or fp8"
            )
        return CACHE_DTYPES[found.pop()] if found else "none"

    def holds(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def shape(self, stored: Stored) -> list[int]:
        codes = stored["weight"]
        outputs, num = codes.shape
        return [outputs, 2 * num if codes.dtype == torch.uint8 else num]

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        codes, scales = tensors["weight"], tensors["weight_scale"]
        if codes.dtype == torch.uint8:
            return mxfp4(codes, scales, dtype)
        if codes.dtype != torch.int8:
            return fp8(codes, scales, None, dtype)
        outputs, inputs = codes.shape
        zeros = tensors.get("weight_zero_point")
        return whole_numbers(
            codes,
            8,
            per_output(scales, outputs),
            None if zeros is None else per_output(zeros, outputs),
            dtype,
            group=inputs,
        )


def _check_form(weight: Any) -> None:
    """Raises ValueError for weights in other codes, or in codes of codes (a list)."""
    form = (weight.get("dtype"), weight.get("qscheme")) if isinstance(weight, dict) else None
    if form not in FORMS:
        raise ValueError(f"weight {form or weight!r} is not supported; supported are {[*FORMS]}")
    for key, known in FORMS[form].items():
        refuse_unless(weight, key, (known,))


SCHEME = Quark

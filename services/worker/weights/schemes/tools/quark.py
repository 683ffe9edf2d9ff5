"""Quark of AMD, as it exports folders for Hugging Face (``pack_method`` does not matter here)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Weight
from services.worker.weights.schemes.scheme import whole_numbers
from services.worker.weights.schemes.tools.fp8 import fp8
from services.worker.weights.schemes.tools.mxfp4 import GROUP, mxfp4
from services.worker.weights.schemes.tools.parts import per_output, refuse_unless
from services.worker.weights.schemes.tools.scaled import Scaled, as_mapping, layers_of
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
# Of an algorithm, if it rotates inputs at each step. Other rotations are parts of the weights.
ONLINE = ("online_r1_rotation", "online_config", "online_had", "r3", "r4")
QUAROT = "quarot"  # r3 and r4 are its defaults


class Quark(Scaled):
    """``weight`` [outputs, inputs] float8_e4m3fn or int8 with ``weight_scale`` of all or of an
    output; or MXFP4, two codes in a byte [outputs, inputs / 2], the first one in its lower half.
    Activations are not quantized."""

    suffixes = (
        *("weight", "weight_scale", "weight_zero_point"),
        *("input_scale", "input_zero_point", "output_scale", "output_zero_point"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        export = as_mapping(config.get("export", {}), "export")
        stored_as = export.get("weight_format", "real_quantized")
        if stored_as != "real_quantized":
            raise ValueError(f"weight_format {stored_as!r} is not supported; 'real_quantized' is")
        _check_algorithms(config.get("algo_config") or [])
        layers = [as_mapping(config.get("global_quant_config") or {}, "global_quant_config")]
        for key in ("layer_quant_config", "layer_type_quant_config"):
            layers += layers_of(config, key)
        for layer in layers:
            if (weight := layer.get("weight")) is not None:
                _check_form(weight)
        cached = [
            as_mapping(each, "kv_cache_quant_config: output_tensors")
            for layer in layers_of(config, "kv_cache_quant_config")
            if (each := layer.get("output_tensors"))
        ]
        self._cache_dtypes = {str(each.get("dtype")) for each in cached}

    def cache_dtype(self) -> str:
        found = self._cache_dtypes
        for dtype in found - CACHE_DTYPES.keys():
            raise ConfigError(
                f"kv-cache-dtype: auto: the checkpoint's kv_cache_quant_config has dtype {dtype!r};"
                f" supported are {list(CACHE_DTYPES)}: set none, int8 or fp8"
            )
        return CACHE_DTYPES[min(found)] if found else "none"

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


def _check_algorithms(algorithms: Any) -> None:
    """Raises ValueError for one that needs more than the weights."""
    for each in [algorithms] if isinstance(algorithms, Mapping) else algorithms:
        algorithm = as_mapping(each, "algo_config:")
        name = algorithm.get("name")
        for key in ONLINE:
            if algorithm.get(key, name == QUAROT and key in ("r3", "r4")):
                raise ValueError(f"algo_config: {name}: online rotations ({key}) are not supported")


def _check_form(weight: Any) -> None:
    """Raises ValueError for weights in other codes, or in codes of codes (a list)."""
    form = None
    if isinstance(weight, Mapping):
        form = str(weight.get("dtype")), str(weight.get("qscheme"))
    if form not in FORMS:
        raise ValueError(f"weight {form or weight!r} is not supported; supported are {[*FORMS]}")
    for key, known in FORMS[form].items():
        refuse_unless(weight, key, (known,))


SCHEME = Quark

"""ModelOpt of NVIDIA, as it exports folders for Hugging Face (``export_hf_checkpoint``)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Weight
from services.worker.weights.schemes.tools.fp8 import MXFP8_BLOCK, fp8, has_blocks
from services.worker.weights.schemes.tools.mxfp4 import nvfp4
from services.worker.weights.schemes.tools.scaled import Scaled, as_mapping, layers_of
from shared.errors import ConfigError

MIXED = "MIXED_PRECISION"
ALGOS = (
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8", "NVFP4", "W4A16_NVFP4"),
    MIXED,
)
BLOCK = [128, 128]  # of FP8_PB_WO
FP8_CACHE = ("FP8", {"type": "float", "num_bits": 8})


class ModelOpt(Scaled):
    """The tensors of a layer determine its format. ``weight`` is float8_e4m3fn [outputs, inputs]
    with ``weight_scale`` of all, of an output, of blocks [outputs / 128, 1, inputs / 128, 1], or
    of 32 inputs, which are exponents in a byte; or it has two e2m1 codes in a byte [outputs,
    inputs / 2], the first one in its lower half, with ``weight_scale`` [outputs, inputs / 16] in
    float8_e4m3fn and their factor ``weight_scale_2``. Activations are not quantized."""

    suffixes = ("weight", "weight_scale", "weight_scale_2", "input_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        # In hf_quant_config.json, the values are one level below.
        own = as_mapping(config.get("quantization", config), "quantization")
        self._cache = own.get("kv_cache_quant_algo") or own.get("kv_cache_scheme")
        is_dense = self._cache and own.get("quant_algo") is None  # but for its KV cache
        for each in ([] if is_dense else [own]) + layers_of(own, "quantized_layers"):
            algo = each.get("quant_algo")
            if str(algo).upper() not in ALGOS:
                raise ValueError(
                    f"quant_algo {algo!r} is not supported; supported are {list(ALGOS)}"
                )

    def cache_dtype(self) -> str:
        found = self._cache
        if not found:
            return "none"
        kind = {key: found.get(key) for key in FP8_CACHE[1]} if isinstance(found, dict) else found
        if kind not in FP8_CACHE:
            raise ConfigError(
                f"kv-cache-dtype: auto: the checkpoint's KV cache is {found!r}; supported is"
                " 'FP8': set none, int8 or fp8"
            )
        return "fp8"

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        codes, scales = tensors["weight"], tensors["weight_scale"]
        if codes.dtype == torch.uint8:
            return nvfp4(codes, scales.float() * tensors["weight_scale_2"].float(), dtype)
        if scales.dtype == torch.uint8:
            return fp8(codes, scales, MXFP8_BLOCK, dtype)
        if scales.ndim == 4:
            scales = scales[:, 0, :, 0]
        return fp8(codes, scales, BLOCK if has_blocks(codes, scales) else None, dtype)


SCHEME = ModelOpt

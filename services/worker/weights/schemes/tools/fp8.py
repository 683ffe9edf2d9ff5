"""Numbers of eight bits, as DeepSeek-V3 (arXiv 2412.19437), Qwen3-FP8 and vLLM store them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.schemes.scheme import Scheme, Stored
from services.worker.weights.schemes.tools.mxfp4 import GROUP, powers_of_2
from services.worker.weights.schemes.tools.parts import blocks_of, per_output

MXFP8_BLOCK = [1, GROUP]


class Fp8(Scheme):
    """``weight`` [outputs, inputs] float8_e4m3fn, which is multiplied with ``weight_scale_inv`` of
    blocks, or with ``weight_scale`` of all or of an output. Scales in a byte are exponents, as in
    MXFP8 (OCP Microscaling Formats 1.0). Activations stay as they are."""

    suffixes = ("weight", "weight_scale_inv", "weight_scale", "input_scale", "activation_scale")

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        block = MXFP8_BLOCK if config["quant_method"] == "mxfp8" else None
        self._block: list[int] | None = config.get("weight_block_size", block)
        if self._block is not None and len(self._block) != 2:
            raise ValueError(f"weight_block_size {self._block} is not of two numbers")

    def holds(self, stored: Stored) -> bool:
        return "weight_scale_inv" in stored or "weight_scale" in stored

    def shape(self, stored: Stored) -> list[int]:
        return stored["weight"].shape

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        codes = tensors["weight"]
        scales = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
        assert scales is not None
        return fp8(codes, scales, self._block, dtype)


def fp8(codes: Tensor, scales: Tensor, block: list[int] | None, dtype: torch.dtype) -> Quantized:
    """Raises ValueError if scales do not match ``block``, or codes are not float8_e4m3fn."""
    scales = powers_of_2(scales)
    if codes.dtype != torch.float8_e4m3fn:
        raise ValueError(f"codes are {codes.dtype}; only torch.float8_e4m3fn is supported")
    outputs, inputs = codes.shape
    if block is None:
        scales, group = per_output(scales, outputs), inputs
    else:
        scales, group = blocks_of(scales, [outputs, inputs], block), block[1]
    return Quantized(codes, scales, dtype=dtype, inputs=inputs, group=group)


def has_blocks(codes: Tensor, scales: Tensor) -> bool:
    """False if there is one scale, or one for each output."""
    return scales.numel() not in (1, len(codes)) or scales.shape[1:] > (1,)


SCHEME = Fp8

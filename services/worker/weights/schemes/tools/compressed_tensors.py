"""The format of llm-compressor, from the package compressed-tensors."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.schemes.scheme import Scheme, Stored, whole_numbers
from services.worker.weights.schemes.tools.fp8 import MXFP8_BLOCK, fp8, has_blocks
from services.worker.weights.schemes.tools.mxfp4 import mxfp4, nvfp4
from services.worker.weights.schemes.tools.parts import per_output, unpack
from shared.errors import ConfigError

FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("mxfp4-pack-quantized", "nvfp4-pack-quantized", "mxfp8-quantized"),
    *("mixed-precision", "dense"),
)
CACHE_DTYPES = {("int", 8): "int8", ("float", 8): "fp8"}  # by type and bits of kv_cache_scheme


class CompressedTensors(Scheme):
    """The tensors of a layer determine its format; only the sizes of groups and blocks come from
    the config. Activations are not quantized."""

    suffixes = (
        *("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
        *("weight_shape", "weight_global_scale"),
        *("input_scale", "input_zero_point", "input_global_scale"),
        *("output_scale", "output_zero_point"),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        for key in ("transform_config", "sparsity_config"):
            if config.get(key):
                raise ValueError(f"{key} is not supported")
        groups = list(config.get("config_groups", {}).values())
        for each in (config, *groups):
            if (found := each.get("format")) not in (None, *FORMATS):
                raise ValueError(f"format {found!r} is not supported; supported are {FORMATS}")
        weights = [each.get("weights") or {} for each in groups]
        self._groups = {each["group_size"] for each in weights if each.get("group_size")}
        self._blocks = [each["block_structure"] for each in weights if each.get("block_structure")]

    def cache_dtype(self) -> str:
        scheme = self.config.get("kv_cache_scheme")
        if scheme is None:
            return "none"
        kind = scheme.get("type"), scheme.get("num_bits")
        if kind not in CACHE_DTYPES:
            raise ConfigError(
                f"kv-cache-dtype: auto: the checkpoint's kv_cache_scheme has type {kind[0]!r} and"
                f" {kind[1]} bits; 8 bits of float or int are supported: set none, int8 or fp8"
            )
        return CACHE_DTYPES[kind]

    def holds(self, stored: Stored) -> bool:
        return "weight_scale" in stored

    def shape(self, stored: Stored) -> list[int]:
        if "weight_packed" not in stored:
            return stored["weight"].shape
        packed = stored["weight_packed"]
        if packed.dtype == torch.uint8:
            outputs, num_bytes = packed.shape
            return [outputs, 2 * num_bytes]
        shape: list[int] = stored["weight_shape"].read_all().tolist()
        return shape

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        if "weight_packed" not in tensors:
            return self._eight_bits(tensors, dtype)
        if tensors["weight_packed"].dtype == torch.uint8:
            return _fp4(tensors, dtype)
        return self._packed(tensors, dtype)

    def _packed(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        words, scales = tensors["weight_packed"], tensors["weight_scale"]
        outputs, inputs = tensors["weight_shape"].tolist()
        bits = next((bits for bits in (4, 8) if words.shape[1] == -(-inputs * bits // 32)), None)
        if bits is None:
            raise ValueError(f"{words.shape[1]} words for {inputs} inputs; only 4 and 8 bits are")
        middle = 1 << bits - 1
        codes = unpack(words, bits)[:, :inputs].short() - middle
        zeros = tensors.get("weight_zero_point")
        if zeros is not None and zeros.dtype == torch.int32:
            zeros = unpack(zeros.T.contiguous(), bits).T[:outputs].short() - middle
        return self._whole_numbers(codes, bits, scales, zeros, tensors, dtype)

    def _eight_bits(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        codes, scales = tensors["weight"], tensors["weight_scale"]
        if codes.dtype == torch.int8:
            zeros = tensors.get("weight_zero_point")
            return self._whole_numbers(codes, 8, scales, zeros, tensors, dtype)
        if scales.dtype == torch.uint8:
            return fp8(codes, scales, MXFP8_BLOCK, dtype)
        return fp8(codes, scales, self._block() if has_blocks(codes, scales) else None, dtype)

    def _block(self) -> list[int]:
        if len(self._blocks) != 1:
            raise ValueError(f"block_structure {self._blocks}; one is needed for scales of blocks")
        found = self._blocks[0]
        return [int(each) for each in found.split("x")] if isinstance(found, str) else found

    def _whole_numbers(
        self,
        codes: Tensor,
        bits: int,
        scales: Tensor,
        zeros: Tensor | None,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> Weight:
        outputs, inputs = codes.shape
        if scales.ndim < 2 or scales.shape[1] == 1:
            scales, group = per_output(scales, outputs), inputs
            zeros = None if zeros is None else per_output(zeros, outputs)
        else:
            group = self._group_size(inputs, scales.shape[1])
        group_of = tensors.get("weight_g_idx")
        if group_of is not None:
            group_of = None if (group_of < 0).any() else group_of.long()
        return whole_numbers(codes, bits, scales, zeros, dtype, group=group, group_of=group_of)

    def _group_size(self, inputs: int, num: int) -> int:
        for size in self._groups:
            if -(-inputs // size) == num:
                return int(size)
        sizes = sorted(self._groups)
        raise ValueError(f"{num} scales for {inputs} inputs, with group_size {sizes}")


def _fp4(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Quantized:
    """MXFP4 with scales that are powers of 2, or NVFP4 with fp8 scales and one global divisor."""
    codes, scales = tensors["weight_packed"], tensors["weight_scale"]
    if "weight_global_scale" not in tensors:
        return mxfp4(codes, scales, dtype)
    return nvfp4(codes, scales.float() / tensors["weight_global_scale"].float(), dtype)


SCHEME = CompressedTensors

"""bitsandbytes formats: NF4 and FP4 (arXiv 2305.14314), and LLM.int8() (arXiv 2208.07339)."""

from collections.abc import Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.schemes.scheme import Scheme, Stored, dense

STATES = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
NESTED = ("nested_absmax", "nested_quant_map")
INT8_UNITS = 127  # of a scale


class _State(msgspec.Struct):
    shape: list[int]
    blocksize: int
    nested_blocksize: int | None = None
    nested_offset: float = 0.0


class BitsAndBytes(Scheme):
    """In four bits ``weight`` [n / 2, 1] uint8 has two codes in a byte, the first one in its upper
    half, indices into ``weight.quant_map``; ``weight.absmax`` are scales of blocks of the flat
    weight, which may be codes themselves. In eight bits ``weight`` is int8 and ``SCB`` [outputs] is
    the value of code 127; outliers of activations get no special treatment."""

    suffixes = (
        *("weight", "SCB", "weight_format"),
        *(f"weight.{each}" for each in ("absmax", "quant_map", *NESTED, *STATES)),
    )

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        kind = config.get("bnb_4bit_quant_storage", "uint8")
        if kind != "uint8":
            raise ValueError(f"bnb_4bit_quant_storage {kind!r} is not supported; only 'uint8' is")

    def holds(self, stored: Stored) -> bool:
        return "weight.absmax" in stored or "SCB" in stored

    def shape(self, stored: Stored) -> list[int]:
        if "SCB" in stored:
            return stored["weight"].shape
        (state,) = (stored[name] for name in _states(stored))
        return _decoded(state.read_all()).shape

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        if "SCB" in tensors:
            codes = tensors["weight"]
            scales = tensors["SCB"].float()[:, None] / INT8_UNITS
            inputs = codes.shape[1]
            return Quantized(codes, scales, dtype=dtype, inputs=inputs, group=inputs)
        (name,) = _states(tensors)
        state = _decoded(tensors[name])
        outputs, inputs = state.shape
        stored = tensors["weight"].flatten()
        scales = _scales(tensors, state)
        if inputs % state.blocksize == 0:
            codes = (stored >> 4 | stored << 4).view(outputs, -1)
            return Quantized(
                codes,
                scales.view(outputs, -1),
                dtype=dtype,
                inputs=inputs,
                group=state.blocksize,
                table=tensors["weight.quant_map"].float(),
            )
        places = torch.stack((stored >> 4, stored & 15), 1).flatten().int()
        values = tensors["weight.quant_map"][places[: outputs * inputs]]
        each = scales.repeat_interleave(state.blocksize)[: len(values)]
        return dense((values * each).view(outputs, inputs), dtype)


def _states(tensors: Mapping[str, Any]) -> list[str]:
    """The suffix of the layer's state."""
    return [name for each in STATES if (name := f"weight.{each}") in tensors]


def _decoded(state: Tensor) -> _State:
    return msgspec.json.decode(bytes(state.tolist()), type=_State)


def _scales(tensors: Mapping[str, Tensor], state: _State) -> Tensor:
    """[blocks] float32"""
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" not in tensors:
        return absmax.float()
    assert state.nested_blocksize is not None
    nested = tensors["weight.nested_absmax"].repeat_interleave(state.nested_blocksize)
    codes = tensors["weight.nested_quant_map"][absmax.int()]
    return codes * nested[: len(codes)] + state.nested_offset


SCHEME = BitsAndBytes

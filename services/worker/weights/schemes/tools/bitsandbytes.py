"""bitsandbytes formats: NF4 and FP4 (arXiv 2305.14314), and LLM.int8() (arXiv 2208.07339)."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from services.worker.layers.weights import Quantized, Weight
from services.worker.weights.schemes.scheme import Scheme, Stored, dense

STATES = ("weight.quant_state.bitsandbytes__nf4", "weight.quant_state.bitsandbytes__fp4")
NESTED = ("nested_absmax", "nested_quant_map")
INT8_UNITS = 127  # of a scale
NUM_CODES = 16
Block = Annotated[int, Meta(ge=1)]


class _State(msgspec.Struct):
    shape: list[int]
    blocksize: Block
    nested_blocksize: Block | None = None
    nested_offset: float = 0.0


class BitsAndBytes(Scheme):
    """In four bits ``weight`` [n / 2, 1] uint8 has two codes in a byte, the first one in its upper
    half, indices into ``weight.quant_map``; ``weight.absmax`` are scales of blocks of the flat
    weight, which may be codes themselves. In eight bits ``weight`` is int8 and ``SCB`` [outputs] is
    the value of code 127; outliers of activations get no special treatment."""

    suffixes = (
        *("weight", "SCB", "weight_format"),
        *(f"weight.{each}" for each in ("absmax", "quant_map", *NESTED)),
        *STATES,
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
        return _decoded(stored[_state_of(stored)].read_all()).shape

    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        if "SCB" in tensors:
            codes = tensors["weight"]
            scales = tensors["SCB"].float()[:, None] / INT8_UNITS
            inputs = codes.shape[1]
            return Quantized(codes, scales, dtype=dtype, inputs=inputs, group=inputs)
        state = _decoded(tensors[_state_of(tensors)])
        outputs, inputs = state.shape
        stored = tensors["weight"].flatten()
        scales, table = _scales(tensors, state), tensors["weight.quant_map"].float()
        if len(table) != NUM_CODES:
            raise ValueError(f"quant_map has {len(table)} values, not {NUM_CODES}")
        if inputs % state.blocksize == 0:
            codes = (stored >> 4 | stored << 4).view(outputs, -1)
            return Quantized(
                codes,
                scales.view(outputs, -1),
                dtype=dtype,
                inputs=inputs,
                group=state.blocksize,
                table=table,
            )
        places = torch.stack((stored >> 4, stored & 15), 1).flatten().int()
        values = table[places[: outputs * inputs]]
        each = scales.repeat_interleave(state.blocksize)[: len(values)]
        return dense((values * each).view(outputs, inputs), dtype)


def _state_of(tensors: Mapping[str, Any]) -> str:
    """The suffix of the layer's state, or of a state that it lacks."""
    return next((each for each in STATES if each in tensors), STATES[0])


def _decoded(state: Tensor) -> _State:
    return msgspec.json.decode(bytes(state.tolist()), type=_State)


def _scales(tensors: Mapping[str, Tensor], state: _State) -> Tensor:
    """[blocks] float32"""
    absmax = tensors["weight.absmax"]
    if "weight.nested_absmax" not in tensors:
        return absmax.float()
    if state.nested_blocksize is None:
        raise ValueError("nested_absmax without a nested_blocksize in its state")
    nested = tensors["weight.nested_absmax"].repeat_interleave(state.nested_blocksize)
    codes = tensors["weight.nested_quant_map"][absmax.int()]
    return codes * nested[: len(codes)] + state.nested_offset


SCHEME = BitsAndBytes

"""``experts`` in four launches: pairs by expert, gates and ups, downs, sums per token.

The host only knows the number of tokens, so a GEMM's grid has room for the worst load of the
experts, and programs without work exit at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.codes import Codes, has_kernels
from kernels.codes.triton import constants, operands
from kernels.experts.biases import Biases
from kernels.experts.blocks import block_of
from kernels.experts.triton.config import config
from kernels.experts.triton.place import place
from kernels.experts.triton.products import down_kernel, gate_up_kernel
from kernels.experts.triton.sums import BLOCK, sum_kernel
from kernels.silu_mul import Act, Clamp, constants_of, num_parts
from kernels.sizes import cdiv


def launch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor | Codes | Sequence[Tensor | Codes],
    down: Tensor | Codes | Sequence[Tensor | Codes],
    residual: Tensor | None,
    biases: Biases | None,
    act: Act | Clamp,
    first: int | None = None,
) -> Tensor:
    if not isinstance(gate_up, Tensor | Codes) or not isinstance(down, Tensor | Codes):
        raise ValueError("experts: the experts' weights must be stacked")
    gate_up_bias, down_bias = _stacked(biases)
    num = num_parts(act)
    _check(x, chosen, weights, gate_up, down, residual, num)
    num_tokens, num_chosen = chosen.shape
    num_experts, hidden, inner = down.shape
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    opening_known, closing_known = constants(gate_up), constants(down)
    block = block_of(num_tokens, x.itemsize)
    opening = config(hidden, x.itemsize, block, opening_known)
    closing = config(inner, x.itemsize, block, closing_known)
    if opening.block_t != closing.block_t:  # one of them has codes
        block_t = min(opening.block_t, closing.block_t)
        opening, closing = (each._replace(block_t=block_t) for each in (opening, closing))
    placed = place(chosen, num_experts, opening.block_t, first or 0)
    most = placed.blocks.shape[1]
    gated = x.new_empty(chosen.numel(), inner)
    make = x.new_empty if first is None else x.new_zeros  # parts of experts elsewhere stay 0
    parts = make(chosen.numel(), hidden)
    gate_up_kernel[cdiv(num * inner, opening.block_rows), most](
        *(x, *placed, *_operands(gate_up), gate_up_bias, gated, most),
        *(num_chosen, num, inner, hidden, *opening_known, *opening[:3], *constants_of(act)),
        **opening.options(opening_known),
    )
    down_kernel[cdiv(hidden, closing.block_rows), most](
        *(gated, *placed, *_operands(down), down_bias, weights, parts, most),
        *(hidden, inner, *closing_known, *closing[:3]),
        **closing.options(closing_known),
    )
    sum_kernel[num_tokens, cdiv(hidden, BLOCK)](
        *(parts, residual, out, num_chosen, hidden, BLOCK), num_warps=4
    )
    return out


def _stacked(biases: Biases | None) -> tuple[Tensor | None, Tensor | None]:
    """Raises ValueError for biases that are not stacked."""
    if biases is None:
        return None, None
    gate_up, down = biases
    if not isinstance(gate_up, Tensor) or not isinstance(down, Tensor | None):
        raise ValueError("experts: the experts' biases must be stacked")
    return gate_up.contiguous(), None if down is None else down.contiguous()


def _check(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    gate_up: Tensor | Codes,
    down: Tensor | Codes,
    residual: Tensor | None,
    num_parts: int,
) -> None:
    """Raises ValueError for dtypes, shapes or groups the kernels cannot read."""
    each = [x, chosen, weights, *([] if residual is None else [residual])]
    dense = [weight for weight in (gate_up, down) if isinstance(weight, Tensor)]
    if not all(tensor.is_contiguous() for tensor in each + dense):
        raise ValueError("experts: all tensors must be contiguous")
    if (chosen.dtype, weights.dtype) != (torch.int32, torch.float32):
        raise ValueError("experts: chosen must be int32 and weights float32")
    num_experts, hidden, inner = down.shape
    if x.shape[1] != hidden or gate_up.shape != (num_experts, num_parts * inner, hidden):
        raise ValueError(
            f"experts: x {list(x.shape)}, gate_up {list(gate_up.shape)} and down"
            f" {list(down.shape)} must be [T, H], [E, {num_parts} I, H] and [E, H, I]"
        )
    if hidden % 8 or inner % 8:
        raise ValueError(f"experts: sizes {hidden} and {inner} must be multiples of 8")
    for weight in (gate_up, down):
        if isinstance(weight, Codes) and not has_kernels(weight):
            raise ValueError("experts: no kernel reads codes in these groups")


def _operands(weight: Tensor | Codes) -> tuple[Tensor | None, ...]:
    return *operands(weight), weight.order if isinstance(weight, Codes) else None

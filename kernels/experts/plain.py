"""``experts`` by torch's matmuls, one used expert after another."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from kernels.codes import Codes
from kernels.experts.biases import Biases
from kernels.silu_mul import Act, Clamp, silu_mul

BLOCK_ROWS = 8  # of each GEMM: another number of rows may round differently


def experts(
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
    num_tokens, num_chosen = chosen.shape
    num_experts = down.shape[0] if isinstance(down, Codes) else len(down)
    parts = x.new_zeros(num_tokens * num_chosen, x.shape[1])
    by_expert = (chosen.flatten() - (first or 0)).sort(stable=True)
    hit, counts = by_expert.values.unique_consecutive(return_counts=True)
    pairs_of = by_expert.indices.split(counts.tolist())
    for expert, pairs in zip(hit.tolist(), pairs_of, strict=True):
        if not 0 <= expert < num_experts:
            continue
        rows = functional.pad(x[pairs // num_chosen], (0, 0, 0, -len(pairs) % BLOCK_ROWS))
        both, back = _dense(gate_up, expert, x.dtype), _dense(down, expert, x.dtype)
        both_bias = None if biases is None else biases.gate_up[expert]
        back_bias = None if biases is None or biases.down is None else biases.down[expert]
        gated = [
            silu_mul(functional.linear(block, both, both_bias), act)
            for block in rows.split(BLOCK_ROWS)
        ]
        blocks = [functional.linear(block, back, back_bias) for block in gated]
        parts[pairs] = torch.cat(blocks)[: len(pairs)]
    weighted = parts.view(num_tokens, num_chosen, x.shape[1]) * weights[:, :, None]
    out = torch.zeros_like(weighted[:, 0]) if residual is None else residual.float()
    for part in weighted.unbind(1):
        out = out + part
    return out.to(x.dtype)


def _dense(
    each: Tensor | Codes | Sequence[Tensor | Codes], expert: int, dtype: torch.dtype
) -> Tensor:
    one = each.expert(expert) if isinstance(each, Codes) else each[expert]
    return one.values(dtype) if isinstance(one, Codes) else one

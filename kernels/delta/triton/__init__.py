"""``gated_delta`` on a device, in four to six launches: the inputs of all tokens, what rows leave
behind of them, the matrices of rows that decode, token by token, those of prompts, chunk by chunk,
and the gated norm.

The sums of a row depend on the row alone. Rows that decode have the same bits however they are
drafted; prompts have the same bits if they are cut at multiples of a chunk. By Kimi's rule prompts
advance token by token too, and any cut gives the same bits.
"""

import torch
from torch import Tensor

from kernels.delta.device import DeviceRows
from kernels.delta.states import DeltaWeights, LayerStates, LightningTerms, ScanTerms
from kernels.delta.triton.advance import advance_kernel
from kernels.delta.triton.chunks import pass_kernel, solve_kernel
from kernels.delta.triton.finish import finish_kernel
from kernels.delta.triton.inputs import mix_kernel, note_kernel
from kernels.sizes import cdiv, next_power_of_2

CHANNELS = 512  # of a program that writes columns; not measured
VALUES = 32  # of a program's part of a matrix; not measured
# Of a program for chunks, and the keys that it reads at once: more take more registers than exist.
CHUNK_VALUES, CHUNK_KEYS = 16, 16
WIDE = 512  # numbers of a norm by a few warps
PRECISION = "tf32x3"  # three products by tensor cores for one in float32


def launch(
    x: Tensor, gates: Tensor, weights: DeltaWeights, layer: LayerStates, rows: DeviceRows
) -> Tensor:
    """The arguments of ``kernels.delta.gated_delta``."""
    if not (x.is_contiguous() and gates.is_contiguous()):
        raise ValueError("gated_delta: x and gates must be contiguous")
    matrices, columns, kept = layer
    (channels, width), num_keys = weights.conv.shape, weights.num_key_heads
    _, num_heads, key_dim, value_dim = matrices.shape
    num_tokens, num_rows, most_drafts = len(x), len(rows.slots), kept.shape[1]
    num_decoding, num_chunks = rows.num_decoding, len(rows.chunk_rows)
    num_gates = gates.shape[1]
    num_inputs = num_tokens + num_decoding * most_drafts
    mixed = x.new_empty(num_inputs, channels, dtype=torch.float32)
    decays = max(1, len(weights.dt_bias) // num_heads)
    openings = x.new_empty(num_inputs, (decays + 1) * num_heads, dtype=torch.float32)
    y = x.new_zeros(num_tokens, num_heads * value_dim, dtype=torch.float32)
    out = torch.empty_like(y, dtype=x.dtype)
    of_rows = rows.slots, rows.starts, rows.token_starts, rows.nums
    dims = num_keys, num_heads, key_dim, value_dim
    blocks = next_power_of_2(key_dim), next_power_of_2(value_dim)
    scan = weights.scan if isinstance(weights.scan, ScanTerms) else None
    skip, bias, limits = scan or (None, None, (0.0, 0.0))
    scans = weights.scan is not None
    norms, rotation, sines, rotated = _turns(weights)
    mix_kernel[num_inputs, 2 * num_keys + num_heads](
        x, gates, columns, kept, weights.conv, bias, weights.decay, weights.dt_bias, norms,
        rotation, *of_rows, rows.token_rows, rows.positions, mixed, openings, num_tokens, *limits,
        weights.eps, sines, columns.stride(0), kept.stride(0), rotated, scans, decays,
        bias is not None, most_drafts, *dims, width, max(blocks), num_warps=2,
    )  # fmt: skip
    note_kernel[num_rows, cdiv(channels + num_gates, CHANNELS)](
        x, gates, columns, kept, *of_rows, rows.num_drafts, rows.positions, rows.copies,
        rows.interval, columns.stride(0), kept.stride(0), most_drafts, channels, num_gates,
        x.shape[1], width, next_power_of_2(width), next_power_of_2(max(1, most_drafts)), CHANNELS,
    )  # fmt: skip
    num_advancing = num_decoding if decays == 1 else num_rows
    if num_advancing:
        advance_kernel[num_advancing, num_heads, cdiv(value_dim, VALUES)](
            mixed, openings, skip, matrices, *of_rows, rows.num_drafts, rows.positions,
            rows.copies, y, num_tokens, rows.interval, matrices.stride(0), scans,
            skip is not None, decays, most_drafts, *dims, blocks[0], VALUES,
        )  # fmt: skip
    if num_rows > num_advancing:
        scores = x.new_empty(num_tokens, num_heads, rows.chunk, dtype=torch.float32)
        solved = None if scans else torch.empty_like(scores)
        solve_kernel[num_chunks, num_heads](
            mixed, openings, rows.chunk_rows, rows.chunks, *of_rows[1:], solved, scores, scans,
            *dims, CHUNK_KEYS, rows.chunk, PRECISION,
        )  # fmt: skip
        pass_kernel[num_rows - num_decoding, num_heads, cdiv(value_dim, CHUNK_VALUES)](
            mixed, openings, solved, scores, skip, matrices, *of_rows, rows.positions,
            rows.copies, y, num_decoding, rows.interval, matrices.stride(0), scans,
            skip is not None, *dims, CHUNK_KEYS, CHUNK_VALUES, rows.chunk, PRECISION,
        )  # fmt: skip
    num_norms = weights.num_norms
    size = num_heads * value_dim // num_norms
    finish_kernel[max(num_tokens, num_rows), num_norms](
        x, y, weights.norm, *of_rows, rows.num_drafts, rows.positions, out, num_tokens, num_rows,
        weights.eps, scans, rotated > 0, decays, channels, num_norms, size, next_power_of_2(size),
        num_warps=2 if size <= WIDE else 8,
    )  # fmt: skip
    return out


def _turns(weights: DeltaWeights) -> tuple[Tensor | None, Tensor | None, int, int]:
    """The norms and the rotation of queries and keys, the place of its sines, and its size."""
    if not isinstance(weights.scan, LightningTerms):
        return None, None, 0, 0
    norms, rotation, _ = weights.scan
    return norms, rotation, rotation.stride(0), rotation.shape[2]

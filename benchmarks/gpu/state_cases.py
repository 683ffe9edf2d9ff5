"""Layers with a state or a short convolution in place of attention, with its heads; no peers."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu.rows import Case, num_copies
from benchmarks.gpu.suite import BLOCK_SIZE, Suite
from benchmarks.gpu.timing import Run
from kernels.delta import DeltaWeights, DeviceRows, LayerStates, gated_delta
from kernels.delta.device import CHUNK, device_rows
from kernels.paged_attention import ChunkRows, DecodeRows
from kernels.short_conv import short_conv

DELTA_WIDTH, CONV_WIDTH = 4, 3  # of the convolutions of Qwen3.5 and LFM2
NUM_SECTIONS = 2  # of a column of LFM2
Runs = tuple[list[Run], list[Run]]


def cases(suite: Suite) -> Iterator[Case]:
    """``num_bytes`` are the states, read and written, or the inputs and outputs of convolutions."""
    for num_rows in suite.batches:
        num_bytes = num_rows * _state_bytes(suite)
        make = partial(_decode, suite, num_rows, num_copies(suite, num_bytes))
        yield Case("gated_delta", f"{num_rows} rows", make, num_bytes)
    for num_tokens in suite.chunks:
        make = partial(_prompt, suite, num_tokens)
        yield Case("gated_delta", f"{num_tokens} tokens", make, _state_bytes(suite))
    for num_tokens in (suite.batches[0], suite.chunks[0]):
        num_bytes = 5 * num_tokens * suite.model["hidden_size"] * suite.dtype.itemsize
        make = partial(_convolve, suite, num_tokens)
        yield Case("short_conv", f"{num_tokens} tokens", make, num_bytes)


def _decode(suite: Suite, num_rows: int, copies: int) -> Runs:
    slots = torch.arange(copies * num_rows, dtype=torch.int32, device=suite.device)
    layer, ones = _states(suite, len(slots)), torch.ones_like(slots[:num_rows])
    positions = torch.full((len(slots) + 1,), CHUNK, dtype=torch.int32, device=suite.device)
    rows = [DecodeRows(1, each, CHUNK * ones, ones) for each in slots.split(num_rows)]
    return [_run(suite, layer, num_rows, positions, each, ones, None) for each in rows], []


def _prompt(suite: Suite, num_tokens: int) -> Runs:
    first, ends = np.zeros(1, np.int64), np.array([0, num_tokens])
    zeros = torch.zeros(2, dtype=torch.int32, device=suite.device)
    chunks = ChunkRows(
        slots=zeros[:1],
        token_starts=torch.from_numpy(ends).int().to(suite.device),
        starts=zeros[:1],
        tile_rows=zeros,
        tile_starts=zeros,
        host_starts=first,
        host_token_starts=ends,
    )
    positions = torch.zeros_like(zeros)
    return [_run(suite, _states(suite, 1), num_tokens, positions, None, zeros, chunks)], []


def _run(
    suite: Suite,
    layer: LayerStates,
    num_tokens: int,
    positions: Tensor,
    decode: DecodeRows | None,
    num_valid: Tensor,
    chunks: ChunkRows | None,
) -> Run:
    """Each run begins at the same positions."""
    num_keys, num_heads, dim = _heads(suite)
    options: dict[str, Any] = {"dtype": suite.dtype, "device": suite.device}
    channels = (2 * num_keys + num_heads) * dim
    weights = DeltaWeights(
        num_keys,
        conv=torch.randn(channels, DELTA_WIDTH, **options),
        decay=torch.zeros(num_heads, device=suite.device),
        dt_bias=torch.zeros(num_heads, device=suite.device),
        norm=torch.ones(dim, device=suite.device),
        eps=1e-6,
    )
    x = torch.randn(num_tokens, channels + num_heads * dim, **options)
    gates = torch.randn(num_tokens, 2 * num_heads, **options)
    copies = torch.full_like(positions, -1)
    rows = device_rows(decode, num_valid, chunks, num_tokens, positions, copies, CHUNK)
    return partial(_from_there, x, gates, weights, layer, rows, positions.clone())


def _from_there(
    x: Tensor,
    gates: Tensor,
    weights: DeltaWeights,
    layer: LayerStates,
    rows: DeviceRows,
    positions: Tensor,
) -> Tensor:
    rows.positions.copy_(positions)
    return gated_delta(x, gates, weights, layer, rows)


def _convolve(suite: Suite, num_tokens: int) -> Runs:
    size = suite.model["hidden_size"]
    options: dict[str, Any] = {"dtype": suite.dtype, "device": suite.device}
    places = torch.arange(num_tokens, device=suite.device)
    shape = num_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, size // NUM_SECTIONS
    caches = [torch.zeros(shape, **options) for _ in range(NUM_SECTIONS)]
    before = places[:, None] - torch.arange(CONV_WIDTH - 1, 0, -1, device=suite.device)
    x, weight = (
        torch.randn(num_tokens, 3 * size, **options),
        torch.randn(size, CONV_WIDTH, **options),
    )
    return [partial(short_conv, x, weight, None, caches, places, before)], []


def _states(suite: Suite, num: int) -> LayerStates:
    num_keys, num_heads, dim = _heads(suite)
    channels = (2 * num_keys + num_heads) * dim
    shapes = (num_heads, dim, dim), (DELTA_WIDTH, channels), (0, channels + 2 * num_heads)
    matrices, columns, kept = (torch.zeros(num, *shape, device=suite.device) for shape in shapes)
    return LayerStates(matrices, columns, kept)


def _state_bytes(suite: Suite) -> int:
    """Of a matrix of each head, read and written."""
    _, num_heads, dim = _heads(suite)
    return 2 * num_heads * dim * dim * 4


def _heads(suite: Suite) -> tuple[int, int, int]:
    """The heads of keys and of values, and their size."""
    config = suite.model
    return config["num_key_value_heads"], config["num_attention_heads"], config["head_dim"]

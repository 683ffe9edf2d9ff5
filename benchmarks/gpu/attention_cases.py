"""Attention of decode rows and of prefill chunks, compared with torch's over contiguous keys."""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.rows import Case, num_copies
from benchmarks.gpu.suite import BLOCK_SIZE, Suite
from benchmarks.gpu.timing import Run
from kernels.kv_codes import HIGHEST_CODE, quantize
from kernels.paged_attention import (
    PLAIN,
    AttentionOptions,
    ChunkRows,
    DecodeRows,
    DeviceAttention,
    attend,
    make_tiles,
)

MAX_CACHE_BYTES = 24 << 30  # torch's copies take as many bytes again
NAMES = {torch.int8: "int8", torch.uint8: "fp8"}
NUM_SHORT, SHORT_LEN = 16, 32  # prompts that arrive at once, and their tokens
LATENT_HEADS, LATENT_RANK, LATENT_ROPE = 16, 512, 64  # of DeepSeek-V2-Lite
WINDOW_SHARE = 8  # of a context: one key in 8 is visible


def cases(suite: Suite) -> Iterator[Case]:
    for num_rows in suite.batches:
        for context in suite.contexts:
            num_bytes = _cache_bytes(suite, num_rows * context)
            if num_bytes <= MAX_CACHE_BYTES:
                yield decode_case(suite, num_rows, context)
    for num_tokens in suite.chunks:
        yield _chunk_case(suite, num_tokens)
    yield _short_chunks_case(suite)
    for context in suite.contexts[-2:]:
        yield _latent_decode_case(suite, suite.batches[0], context)
    yield _latent_chunk_case(suite, suite.chunks[-2:][0])
    yield _windowed_decode_case(suite, suite.contexts[-1])
    yield _windowed_chunk_case(suite, suite.chunks[-1])
    for codes in HIGHEST_CODE:
        yield _coded_decode_case(suite, suite.contexts[-1], codes)
        yield _coded_chunk_case(suite, suite.chunks[-1], codes)


def decode_case(suite: Suite, num_rows: int, context: int) -> Case:
    num_bytes = _cache_bytes(suite, num_rows * context)
    make = partial(_decode, suite, num_rows, context, num_copies(suite, num_bytes))
    shape = f"{num_rows} × {context} keys"
    return Case("decode attention", shape, make, num_bytes, peer="SDPA", compares=True)


def _latent_decode_case(suite: Suite, num_rows: int, context: int) -> Case:
    num_bytes = num_rows * context * (LATENT_RANK + LATENT_ROPE) * suite.dtype.itemsize

    def make() -> tuple[list[Run], list[Run]]:
        copies = num_copies(suite, num_bytes)
        cache, tables = _latents(suite, copies * num_rows, context)
        starts = torch.full((num_rows,), context - 1, dtype=torch.int32, device=suite.device)
        slots = torch.arange(copies * num_rows, dtype=torch.int32, device=suite.device)
        arrivals = torch.zeros(num_rows, dtype=torch.int32, device=suite.device)
        rows = [DecodeRows(1, each, starts, arrivals) for each in slots.split(num_rows)]
        attentions = (DeviceAttention(tables, each, None, BLOCK_SIZE, context) for each in rows)
        return [_attend_latents(suite, cache, each, num_rows) for each in attentions], []

    return Case("latent decode attention", f"{num_rows} × {context} keys", make, num_bytes)


def _latent_chunk_case(suite: Suite, num_tokens: int) -> Case:
    num_bytes = num_tokens * (LATENT_RANK + LATENT_ROPE) * suite.dtype.itemsize
    num_flops = LATENT_HEADS * num_tokens * (num_tokens + 1) * (2 * LATENT_RANK + LATENT_ROPE)

    def make() -> tuple[list[Run], list[Run]]:
        cache, tables = _latents(suite, 1, num_tokens)
        chunks = _chunk_rows(suite, num_tokens, 1)
        attention = DeviceAttention(tables, None, chunks, BLOCK_SIZE, 1)
        return [_attend_latents(suite, cache, attention, num_tokens)], []

    return Case("latent chunk attention", f"{num_tokens} tokens", make, num_bytes, num_flops)


def _latents(suite: Suite, num_rows: int, context: int) -> tuple[Tensor, Tensor]:
    return _pages(suite, num_rows, context, (1, 1, LATENT_RANK + LATENT_ROPE))


def _attend_latents(
    suite: Suite, cache: Tensor, attention: DeviceAttention, num_tokens: int
) -> Run:
    size = LATENT_RANK + LATENT_ROPE
    query = torch.randn(num_tokens, LATENT_HEADS, size, device=suite.device, dtype=suite.dtype)
    return partial(attend, query, cache, attention, 0.1, AttentionOptions(value_dim=LATENT_RANK))


def _windowed_decode_case(suite: Suite, context: int) -> Case:
    """Counts the bytes of visible keys; torch has no equivalent."""
    num_rows, window = suite.batches[0], context // WINDOW_SHARE
    num_bytes = _cache_bytes(suite, num_rows * window)

    def make() -> tuple[list[Run], list[Run]]:
        copies = num_copies(suite, num_bytes)
        return _decode(suite, num_rows, context, copies, AttentionOptions(window))[0], []

    shape = f"{num_rows} × {context} keys, {window} seen"
    return Case("decode attention, window", shape, make, num_bytes)


def _coded_decode_case(suite: Suite, context: int, codes: torch.dtype) -> Case:
    """A quantized cache; torch has no equivalent."""
    num_rows, num_bytes = suite.batches[0], _coded_bytes(suite, suite.batches[0] * context)

    def make() -> tuple[list[Run], list[Run]]:
        copies = num_copies(suite, num_bytes)
        return _decode(suite, num_rows, context, copies, codes=codes)[0], []

    shape = f"{num_rows} × {context} keys"
    return Case(f"decode attention, {NAMES[codes]}", shape, make, num_bytes)


def _decode(
    suite: Suite,
    num_rows: int,
    context: int,
    copies: int,
    options: AttentionOptions = PLAIN,
    codes: torch.dtype | None = None,
) -> tuple[list[Run], list[Run]]:
    num_heads, num_kv_heads, head_dim = _heads(suite)
    numbers, tables = _cache(suite, copies * num_rows, context)
    cache, scales = (numbers, None) if codes is None else quantize(numbers, codes)
    query = torch.randn(num_rows, num_heads, head_dim, device=suite.device, dtype=suite.dtype)
    starts = torch.full((num_rows,), context - 1, dtype=torch.int32, device=suite.device)
    slots = torch.arange(copies * num_rows, dtype=torch.int32, device=suite.device)
    arrivals = torch.zeros(num_rows * num_kv_heads, dtype=torch.int32, device=suite.device)
    scale = head_dim**-0.5
    ours: list[Run] = []
    theirs: list[Run] = []
    grouped = query.unflatten(1, (num_kv_heads, -1))  # heads that share keys, as tokens
    for rows in slots.split(num_rows):
        decode = DecodeRows(1, rows, starts, arrivals)
        attention = DeviceAttention(tables, decode, None, BLOCK_SIZE, context)
        ours.append(partial(attend, query, cache, attention, scale, options, scales))
        key, value = _in_one_piece(numbers, tables[rows.long()])
        theirs.append(partial(scaled_dot_product_attention, grouped, key, value, scale=scale))
    return ours, theirs


def _chunk_case(suite: Suite, num_tokens: int) -> Case:
    num_heads, _, head_dim = _heads(suite)
    num_flops = 2 * num_heads * head_dim * num_tokens * (num_tokens + 1)
    shape = f"{num_tokens} tokens"
    num_bytes = _cache_bytes(suite, num_tokens)
    make = partial(_chunk, suite, num_tokens)
    return Case("chunk attention", shape, make, num_bytes, num_flops, "SDPA", True)


def _short_chunks_case(suite: Suite) -> Case:
    """Short chunks leave most of a program with one head empty."""
    num_heads, _, head_dim = _heads(suite)
    num_flops = NUM_SHORT * 2 * num_heads * head_dim * SHORT_LEN * (SHORT_LEN + 1)
    num_bytes = _cache_bytes(suite, NUM_SHORT * SHORT_LEN)
    make = partial(_chunk, suite, SHORT_LEN, num_chunks=NUM_SHORT)
    shape = f"{NUM_SHORT} × {SHORT_LEN} tokens"
    return Case("chunk attention", shape, make, num_bytes, num_flops, "SDPA", True)


def _windowed_chunk_case(suite: Suite, num_tokens: int) -> Case:
    num_heads, _, head_dim = _heads(suite)
    window = num_tokens // WINDOW_SHARE
    num_flops = 4 * num_heads * head_dim * num_tokens * window

    def make() -> tuple[list[Run], list[Run]]:
        return _chunk(suite, num_tokens, AttentionOptions(window))[0], []

    shape, num_bytes = f"{num_tokens} tokens, {window} seen", _cache_bytes(suite, num_tokens)
    return Case("chunk attention, window", shape, make, num_bytes, num_flops)


def _coded_chunk_case(suite: Suite, num_tokens: int, codes: torch.dtype) -> Case:
    num_heads, _, head_dim = _heads(suite)
    num_flops = 2 * num_heads * head_dim * num_tokens * (num_tokens + 1)

    def make() -> tuple[list[Run], list[Run]]:
        return _chunk(suite, num_tokens, codes=codes)[0], []

    shape, num_bytes = f"{num_tokens} tokens", _coded_bytes(suite, num_tokens)
    return Case(f"chunk attention, {NAMES[codes]}", shape, make, num_bytes, num_flops)


def _chunk(
    suite: Suite,
    num_tokens: int,
    options: AttentionOptions = PLAIN,
    codes: torch.dtype | None = None,
    num_chunks: int = 1,
) -> tuple[list[Run], list[Run]]:
    num_heads, _, head_dim = _heads(suite)
    numbers, tables = _cache(suite, num_chunks, num_tokens)
    cache, scales = (numbers, None) if codes is None else quantize(numbers, codes)
    shape = (num_chunks, num_tokens, num_heads, head_dim)
    query = torch.randn(shape, device=suite.device, dtype=suite.dtype)
    chunks = _chunk_rows(suite, num_tokens, num_chunks)
    attention = DeviceAttention(tables, None, chunks, BLOCK_SIZE, 1)
    key, value = _in_one_piece(numbers, tables)
    by_head, query = query.transpose(1, 2), query.flatten(0, 1)
    ours = partial(attend, query, cache, attention, head_dim**-0.5, options, scales)
    return [ours], [partial(_causal, by_head, key, value)]


def _chunk_rows(suite: Suite, num_tokens: int, num_chunks: int) -> ChunkRows:
    nums = np.full(num_chunks, num_tokens)
    zeros = torch.zeros(num_chunks, dtype=torch.int32, device=suite.device)
    slots = torch.arange(num_chunks, dtype=torch.int32, device=suite.device)
    tile_rows, tile_starts = (torch.from_numpy(e).to(suite.device) for e in make_tiles(nums))
    ends = np.arange(num_chunks + 1) * num_tokens
    starts = np.zeros(num_chunks, np.int64)
    on_device = slots.new_tensor(ends)
    return ChunkRows(slots, on_device, zeros, tile_rows, tile_starts, starts, ends)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """query [B, H, T, D], key and value [B, H_kv, T, D] → [B, T, H, D]."""
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def _cache(suite: Suite, num_rows: int, context: int) -> tuple[Tensor, Tensor]:
    """A cache, and tables [num_rows, blocks of a row] int32 in random order."""
    return _pages(suite, num_rows, context, (2, *_heads(suite)[1:]))


def _pages(
    suite: Suite, num_rows: int, context: int, entry: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    num_blocks = -(-context // BLOCK_SIZE)
    shape = (num_rows * num_blocks + 1, BLOCK_SIZE, *entry)
    cache = torch.empty(shape, dtype=suite.dtype, device=suite.device).normal_()
    tables = torch.randperm(num_rows * num_blocks, device=suite.device)
    return cache, tables.int().view(num_rows, num_blocks)


def _in_one_piece(cache: Tensor, tables: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values, each [rows, H_kv, blocks of a row * BLOCK_SIZE, D]."""
    rows = cache[tables.long()].flatten(1, 2)
    return rows[:, :, 0].transpose(1, 2).contiguous(), rows[:, :, 1].transpose(1, 2).contiguous()


def _cache_bytes(suite: Suite, num_tokens: int) -> int:
    _, num_kv_heads, head_dim = _heads(suite)
    return num_tokens * 2 * num_kv_heads * head_dim * suite.dtype.itemsize


def _coded_bytes(suite: Suite, num_tokens: int) -> int:
    _, num_kv_heads, head_dim = _heads(suite)
    return num_tokens * 2 * num_kv_heads * (head_dim + torch.float32.itemsize)


def _heads(suite: Suite) -> tuple[int, int, int]:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    num_heads, num_kv_heads, head_dim = (suite.model[name] for name in names)
    return num_heads, num_kv_heads, head_dim

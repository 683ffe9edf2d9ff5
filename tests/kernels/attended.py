"""Steps with row lengths on the device, and the results of ``attend``."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.kv_codes import HIGHEST_CODE, quantize
from kernels.paged_attention import (
    PLAIN,
    AttentionOptions,
    ChunkRows,
    DecodeRows,
    DeviceAttention,
    attend,
    make_tiles,
    prepare_attention,
    reference,
)
from shared.wire.kv_groups import num_passed
from shared.wire.messages import Group
from tests.kernels.strided import apart

MAX_BLOCKS, MAX_KV_HEADS = 24, 8
CPU = torch.device("cpu")


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Step(NamedTuple):
    """Rows as (tokens before, tokens): decode rows have ``width`` tokens each."""

    starts: list[int] = []  # noqa: RUF012 - a NamedTuple's fields are its defaults
    width: int = 1
    chunks: list[tuple[int, int]] = []  # noqa: RUF012
    block_size: int = 4
    hides: bool = False  # each row hides some keys before its first token
    together: int = 0  # every second of these groups of a chunk's tokens is an image

    @property
    def rows(self) -> np.ndarray:
        """[rows, 2] int64: tokens before, tokens."""
        rows = [(start, self.width) for start in self.starts] + self.chunks
        return np.array(rows, np.int64).reshape(-1, 2)

    @property
    def first_keys(self) -> np.ndarray | None:
        before = self.rows[:, 0]
        return np.arange(len(before)) % (before + 1) if self.hides else None

    @property
    def ends(self) -> np.ndarray | None:
        """[tokens] int64"""
        if not self.together:
            return None
        before = np.zeros(len(self.starts) * self.width, np.int64)
        own = [ends_of(start, num, self.together) for start, num in self.chunks]
        return np.concatenate([before, *own])

    def first_seen(self, window: int | None) -> np.ndarray:
        """[rows] int64: the first key visible to any token of a row."""
        first_keys = np.zeros(len(self.rows), np.int64) if not self.hides else self.first_keys
        assert first_keys is not None
        return np.maximum(first_keys, 0 if window is None else self.rows[:, 0] + 1 - window)


def ends_of(start: int, num_tokens: int, together: int) -> np.ndarray:
    """[num_tokens] int64: tokens from ``start`` on see the keys before these."""
    tokens = np.arange(num_tokens)
    group_ends = np.minimum((tokens // together + 1) * together, num_tokens)
    found: np.ndarray = start + np.where(tokens // together % 2, group_ends, tokens + 1)
    return found


def every_option(num_heads: int) -> AttentionOptions:
    """Includes values smaller than keys, of 16 elements or more."""
    return AttentionOptions(9, 1.5, torch.randn(num_heads), 12)


def compare(
    step: Step,
    heads: Heads,
    tolerance: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    options: AttentionOptions = PLAIN,
    codes: torch.dtype | None = None,
) -> None:
    """Asserts that ``attend`` and the reference agree, with NaN in every invisible key. The cache
    may be quantized to ``codes``."""
    starts, num_tokens = step.rows.T
    tables, cache = random_cache(step, heads, dtype, options)
    cache, scales = in_codes(cache, codes)
    query = torch.randn(int(num_tokens.sum()), *heads[::2]).to(dtype)
    num_keys = starts + num_tokens
    batch = prepare_attention(
        num_tokens, num_keys, tables, step.block_size, dtype, CPU, step.first_keys
    )
    batch = replace(batch, ends=step.ends)
    scale = heads.head_dim**-0.5
    expected = reference.paged_attention(query, cache, batch, scale, options, scales)
    with device:
        attention = device_attention(step, tables)
    if options.sinks is not None:
        options = options._replace(sinks=options.sinks.to(device))
    if scales is not None:
        scales = apart(scales.to(device))
    actual = attend(query.to(device), apart(cache.to(device)), attention, scale, options, scales)
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)
    assert attention.decode is None or not attention.decode.arrivals.any(), "for the next launch"


def assert_later_tokens_do_not_matter(heads: Heads, codes: torch.dtype | None = None) -> None:
    """NaN in the keys and values of a row's last token changes nothing for earlier tokens."""
    step = Step([6, 30], 3, [(5, 4)])
    last = step.rows.sum(1) - 1
    tables, cache = random_cache(step, heads, torch.float32)
    query = torch.randn(int(step.rows[:, 1].sum()), *heads[::2])
    attention = device_attention(step, tables)
    cache, scales = in_codes(cache, codes)
    expected = attend(query, cache, attention, 1.0, kv_scales=scales)
    spoilt = cache if scales is None else scales
    spoilt[tables[np.arange(3), last // step.block_size], last % step.block_size] = float("nan")
    actual = attend(query, cache, attention, 1.0, kv_scales=scales)
    before = torch.tensor([0, 1, 3, 4, 6, 7, 8])
    torch.testing.assert_close(actual[before], expected[before], atol=0, rtol=0)


def assert_passed_blocks_do_not_matter(
    window: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    codes: torch.dtype | None = None,
) -> None:
    """A row's blocks behind the window of a token before its first may be the null block, here
    NaN."""
    step = Step([63, 64, 200, 351], 2, [(130, 40), (300, 80)], block_size=16)
    options, null_block = AttentionOptions(window), len(step.rows) * MAX_BLOCKS
    tables, cache = random_cache(step, Heads(4, 2, 16), dtype, options)
    cache, scales = in_codes(cache.to(device), codes)
    query = torch.randn(int(step.rows[:, 1].sum()), 4, 16).to(dtype).to(device)
    dropped = tables.copy()
    for table, start in zip(dropped, step.rows[:, 0].tolist(), strict=True):
        table[: num_passed(Group(window), start + 1, step.block_size)] = null_block
    assert (dropped == null_block).any()
    with device:
        before, after = (device_attention(step, each) for each in (tables, dropped))
    expected = attend(query, cache, before, 1.0, options, scales)
    assert expected.isfinite().all()
    assert torch.equal(attend(query, cache, after, 1.0, options, scales), expected)


def assert_first_tokens_do_not_matter(
    heads: Heads,
    width: int,
    dtype: torch.dtype,
    device: torch.device,
    options: AttentionOptions,
    codes: torch.dtype | None = None,
) -> None:
    """A token's bits do not depend on the position of the first token of its row of ``width``."""
    num_keys, positions = 160, range(120, 150)
    tables, cache = random_cache(Step(chunks=[(0, num_keys)], block_size=16), heads, dtype)
    cache, scales = in_codes(cache.to(device), codes)
    query = torch.randn(num_keys, *heads[::2]).to(dtype).to(device)
    found: dict[int, Tensor] = {}
    for start in positions:
        with device:
            attention = device_attention(Step([start], width, block_size=16), tables)
        out = attend(query[start : start + width], cache, attention, 1.0, options, scales)
        for position, of_token in enumerate(out, start):
            assert torch.equal(found.setdefault(position, of_token), of_token), (start, position)


def decoded_rows(
    heads: Heads,
    width: int,
    num_rows: int,
    dtype: torch.dtype,
    device: torch.device,
    options: AttentionOptions = PLAIN,
    codes: torch.dtype | None = None,
) -> Callable[[int], Tensor]:
    """The output of the first rows of ``num_rows`` rows of any length."""
    starts = np.random.default_rng(width).integers(0, 300, num_rows).tolist()
    step = Step(starts, width, block_size=16)
    tables, cache = random_cache(step, heads, dtype, options)
    cache, scales = in_codes(cache.to(device), codes)
    query = torch.randn(num_rows * width, *heads[::2]).to(dtype).to(device)
    with device:
        whole = device_attention(step, tables)
    every = whole.decode
    assert every is not None

    def decode(num: int) -> Tensor:
        rows = replace(every, slots=every.slots[:num], starts=every.starts[:num])
        attention = replace(whole, decode=rows)
        out = attend(query[: num * width], cache, attention, 1.0, options, scales)
        return out.unflatten(0, (num, width))

    return decode


def attended_chunks(
    heads: Heads,
    chunks: list[tuple[int, int]],
    options: AttentionOptions = PLAIN,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> Callable[[], Tensor]:
    """The output for the same tokens and keys, repeatedly."""
    step = Step(chunks=chunks, block_size=16)
    tables, cache = random_cache(step, heads, dtype, options)
    cache = cache.to(device)
    query = torch.randn(sum(num for _, num in chunks), *heads[::2]).to(dtype).to(device)
    with device:
        attention = device_attention(step, tables)
    return lambda: attend(query, cache, attention, 1.0, options)


def device_attention(step: Step, tables: np.ndarray) -> DeviceAttention:
    """tables [rows, MAX_BLOCKS] int64, the decode rows' first; slots are in the opposite order."""
    starts, num_tokens = step.rows.T
    num_decoding = len(step.starts)
    slots = _int32(np.arange(len(tables))[::-1])
    first_keys = None if step.first_keys is None else _int32(step.first_keys)
    parts = [
        (slots[part], _int32(starts[part]), None if first_keys is None else first_keys[part])
        for part in (slice(num_decoding), slice(num_decoding, None))
    ]
    arrivals = torch.zeros(num_decoding * MAX_KV_HEADS, dtype=torch.int32)
    decode = DecodeRows(step.width, *parts[0][:2], arrivals, parts[0][2])
    host_starts, host_nums = starts[num_decoding:], num_tokens[num_decoding:]
    token_starts = decode.num_tokens + np.concatenate([[0], np.cumsum(host_nums)])
    tile_rows, tile_starts = map(_int32, make_tiles(host_nums))
    chunks = ChunkRows(
        parts[1][0],
        _int32(token_starts),
        parts[1][1],
        tile_rows,
        tile_starts,
        host_starts,
        token_starts,
        parts[1][2],
        None if step.ends is None else _int32(step.ends),
    )
    return DeviceAttention(
        _int32(tables[::-1]),
        decode if step.starts else None,
        chunks if step.chunks else None,
        step.block_size,
        max((start + step.width for start in step.starts), default=0),
    )


def assert_padding_changes_nothing(
    heads: Heads, width: int, options: AttentionOptions = PLAIN, num_planes: int = 2
) -> None:
    """Padding, with more elements than a row has room for, does not change a step's tokens, and
    reads no table but its own. The cache has keys and values, or keys alone."""
    step = Step([6, 19], width, [(5, 4), (0, 7)], block_size=1)
    num_blocks, num_tokens = len(step.rows) * MAX_BLOCKS, int(step.rows[:, 1].sum())
    tables = np.random.default_rng().permutation(num_blocks).reshape(-1, MAX_BLOCKS)
    shape = num_blocks + 1, step.block_size, num_planes, *heads[1:]
    cache, query = torch.randn(shape), torch.randn(num_tokens + 4 * MAX_BLOCKS, *heads[::2])
    attention = device_attention(step, tables)
    expected = attend(query[:num_tokens], cache, attention, 1.0, options)
    padded = padded_attention(attention, len(query))
    found = attend(query, cache, padded, 1.0, options)
    assert torch.equal(found[:num_tokens], expected)
    assert found.isfinite().all()
    cache[tables[:-1]] += 1  # slot 0 has the last table
    of_others = attend(query, cache, padded, 1.0, options)
    assert torch.equal(of_others[num_tokens:], found[num_tokens:])
    assert padded.decode is not None
    assert not padded.decode.arrivals.any(), "for the next launch"


def padded_attention(attention: DeviceAttention, num_tokens: int) -> DeviceAttention:
    """With three decode rows without keys, a chunk of the remaining tokens, two empty chunks, and
    tiles of the last of these."""
    decode, chunks = attention.decode, attention.chunks
    assert decode is not None
    assert chunks is not None
    host_token_starts = np.append(chunks.host_token_starts, 3 * [num_tokens])
    tile_rows, tile_starts = make_tiles(np.diff(host_token_starts))
    last = len(host_token_starts) - 2
    return replace(
        attention,
        decode=replace(
            decode,
            slots=_behind(decode.slots, [0, 0, 0]),
            starts=_behind(decode.starts, 3 * [-decode.width]),
            arrivals=_behind(decode.arrivals, 3 * MAX_KV_HEADS * [0]),
        ),
        chunks=replace(
            chunks,
            slots=_behind(chunks.slots, [0, 0, 0]),
            token_starts=_int32(host_token_starts),
            starts=_behind(chunks.starts, [0, 0, 0]),
            tile_rows=_int32(np.append(tile_rows, [last, last])),
            tile_starts=_int32(np.append(tile_starts, [0, 0])),
            host_starts=np.append(chunks.host_starts, [0, 0, 0]),
            host_token_starts=host_token_starts,
        ),
    )


def _behind(tensor: Tensor, values: list[int]) -> Tensor:
    return torch.cat((tensor, tensor.new_tensor(values)))


def random_cache(
    step: Step, heads: Heads, dtype: torch.dtype, options: AttentionOptions = PLAIN
) -> tuple[np.ndarray, Tensor]:
    """Block tables of the rows, and a cache that is NaN except for visible keys and values, whose
    sizes may differ."""
    generator = np.random.default_rng()
    num_blocks = len(step.rows) * MAX_BLOCKS
    tables = generator.permutation(num_blocks).reshape(-1, MAX_BLOCKS)
    key_dim, value_dim = heads.head_dim, options.value_dim or heads.head_dim
    size = max(key_dim, value_dim)
    shape = (num_blocks + 1, step.block_size, 2, heads.num_kv_heads, size)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    first_seen = step.first_seen(options.window)
    for row, num_keys in enumerate(step.rows.sum(1).tolist()):
        keys = np.arange(first_seen[row], num_keys)
        entries = torch.randn(len(keys), *shape[2:]).to(dtype)
        entries[:, 0, :, key_dim:] = entries[:, 1, :, value_dim:] = torch.nan
        cache[tables[row, keys // step.block_size], keys % step.block_size] = entries
    return tables, cache


def in_codes(cache: Tensor, codes: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    """``cache`` quantized, if ``codes`` are given. NaN keys or values get a NaN scale."""
    if codes is None:
        return cache, None
    found, _ = quantize(cache.nan_to_num(), codes)
    numbers = cache.float().abs()
    scales = numbers.nan_to_num().amax(-1) / HIGHEST_CODE[codes]
    scales[numbers.isnan().all(-1)] = torch.nan
    return found, scales


def _int32(array: np.ndarray) -> Tensor:
    return torch.tensor(array.astype(np.int32))

"""Steps of rows whose lengths are on the device, and what ``attend`` makes of them."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.paged_attention import (
    ChunkRows,
    DecodeRows,
    DeviceAttention,
    attend,
    make_tiles,
    prepare_attention,
    reference,
)

MAX_BLOCKS = 24
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
    hides: bool = False  # each row hides some of the keys before its first token

    @property
    def rows(self) -> np.ndarray:
        """[rows, 2] int64: tokens before, tokens."""
        rows = [(start, self.width) for start in self.starts] + self.chunks
        return np.array(rows, np.int64).reshape(-1, 2)

    @property
    def first_keys(self) -> np.ndarray | None:
        before = self.rows[:, 0]
        return np.arange(len(before)) % (before + 1) if self.hides else None


def compare(
    step: Step,
    heads: Heads,
    tolerance: float,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> None:
    """Asserts that ``attend`` and the reference agree where every key that no token sees is NaN."""
    starts, num_tokens = step.rows.T
    tables, cache = random_cache(step, heads, dtype)
    query = torch.randn(int(num_tokens.sum()), *heads[::2]).to(dtype)
    num_keys = starts + num_tokens
    batch = prepare_attention(
        num_tokens, num_keys, tables, step.block_size, dtype, CPU, step.first_keys
    )
    expected = reference.paged_attention(query, cache, batch, heads.head_dim**-0.5)
    with device:
        attention = device_attention(step, tables)
    actual = attend(query.to(device), cache.to(device), attention, heads.head_dim**-0.5)
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


def assert_later_tokens_do_not_matter(heads: Heads) -> None:
    """NaN in the keys and values of a row's last token changes nothing of the tokens before it."""
    step = Step([6, 30], 3, [(5, 4)])
    last = step.rows.sum(1) - 1
    tables, cache = random_cache(step, heads, torch.float32)
    query = torch.randn(int(step.rows[:, 1].sum()), *heads[::2])
    attention = device_attention(step, tables)
    expected = attend(query, cache, attention, 1.0)
    cache[tables[np.arange(3), last // step.block_size], last % step.block_size] = float("nan")
    actual = attend(query, cache, attention, 1.0)
    before = torch.tensor([0, 1, 3, 4, 6, 7, 8])
    torch.testing.assert_close(actual[before], expected[before], atol=0, rtol=0)


def decoded_rows(
    heads: Heads, width: int, num_rows: int, dtype: torch.dtype, device: torch.device
) -> Callable[[int], Tensor]:
    """What comes out for the first so many of ``num_rows`` rows of any length."""
    starts = np.random.default_rng(width).integers(0, 300, num_rows).tolist()
    step = Step(starts, width, block_size=16)
    tables, cache = random_cache(step, heads, dtype)
    cache, query = cache.to(device), torch.randn(num_rows * width, *heads[::2]).to(dtype).to(device)
    with device:
        whole = device_attention(step, tables).decode
    assert whole is not None

    def decode(num: int) -> Tensor:
        rows = replace(whole, slots=whole.slots[:num], starts=whole.starts[:num])
        attention = DeviceAttention(rows, None, step.block_size, max(starts) + width)
        return attend(query[: num * width], cache, attention, 1.0).unflatten(0, (num, width))

    return decode


def device_attention(step: Step, tables: np.ndarray) -> DeviceAttention:
    """tables [rows, MAX_BLOCKS] int64, the decode rows' first; slots are in the opposite order."""
    starts, num_tokens = step.rows.T
    num_decoding = len(step.starts)
    slots = _int32(np.arange(len(tables))[::-1])
    on_device = _int32(tables[::-1])
    first_keys = None if step.first_keys is None else _int32(step.first_keys)
    parts = [
        (slots[part], _int32(starts[part]), None if first_keys is None else first_keys[part])
        for part in (slice(num_decoding), slice(num_decoding, None))
    ]
    decode = DecodeRows(step.width, parts[0][0], on_device, *parts[0][1:])
    host_starts, host_nums = starts[num_decoding:], num_tokens[num_decoding:]
    tile_rows, tile_starts = map(_int32, make_tiles(host_nums))
    chunks = ChunkRows(
        on_device,
        parts[1][0],
        _int32(np.concatenate([[0], np.cumsum(host_nums)])),
        parts[1][1],
        tile_rows,
        tile_starts,
        host_starts,
        host_nums,
        parts[1][2],
    )
    return DeviceAttention(
        decode if step.starts else None,
        chunks if step.chunks else None,
        step.block_size,
        max((start + step.width for start in step.starts), default=0),
    )


def random_cache(step: Step, heads: Heads, dtype: torch.dtype) -> tuple[np.ndarray, Tensor]:
    """Block tables of the rows, and a cache that is NaN but for the keys that they see."""
    generator = np.random.default_rng()
    num_blocks = len(step.rows) * MAX_BLOCKS
    tables = generator.permutation(num_blocks).reshape(-1, MAX_BLOCKS)
    shape = (num_blocks + 1, step.block_size, 2, heads.num_kv_heads, heads.head_dim)
    cache = torch.full(shape, float("nan"), dtype=dtype)
    first_keys = step.first_keys
    for row, num_keys in enumerate(step.rows.sum(1).tolist()):
        keys = np.arange(0 if first_keys is None else first_keys[row], num_keys)
        blocks = tables[row, keys // step.block_size]
        cache[blocks, keys % step.block_size] = torch.randn(len(keys), *shape[2:]).to(dtype)
    return tables, cache


def _int32(array: np.ndarray) -> Tensor:
    return torch.tensor(array.astype(np.int32))

"""Deltas of adapters by the slots of a step's rows, against the reference."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adapt import Change
from kernels.adapt import reference as adapt_reference
from kernels.adapt.bank import AdapterRows, Bank, fill, make_blocks, padded_rank
from kernels.adapt.device import add_deltas, inner_products
from kernels.paged_attention import ChunkRows, DecodeRows, make_tiles

SIZES = [70, 16, 33]  # outputs of the parts: one with two blocks, the others with part of one
FIRSTS, OUTPUTS = [0, 70, 86], 119
INPUTS = 600  # two splits, the second one not full
NUM_SLOTS = 12
OF_SLOTS = [0, 2, -1, 1, 0, -1, 2, 1, 3, 0, 1, -1]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}  # of A x, which is rounded


class Case(NamedTuple):
    """Decode rows of ``width`` tokens, then chunks with ``nums`` tokens; ``spare`` more tokens and
    rows pad both."""

    num_decoding: int
    width: int
    nums: list[int]
    spare: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_decoding * self.width + sum(self.nums) + self.spare


CASES = {
    "decode": Case(7, 1, []),
    "drafts": Case(5, 3, []),
    "wide drafts": Case(3, 17, []),
    "chunks": Case(0, 1, [1, 40, 5]),
    "both": Case(4, 2, [130, 1]),
    "padded": Case(3, 2, [9, 1], spare=6),
}


def draw(dtype: torch.dtype) -> list[list[Change]]:
    """Adapters of several ranks, one for each part or for the middle alone; the last has none."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / 10).to(dtype)

    parts = [*zip(FIRSTS, SIZES, strict=True)]
    chosen = [(4, parts), (16, parts[1:2]), (20, parts[::2])]
    changes = [
        [Change(first, numbers(rank, INPUTS), numbers(size, rank)) for first, size in own]
        for rank, own in chosen
    ]
    return [*changes, []]


def bank_of(changes: list[list[Change]], dtype: torch.dtype, device: torch.device) -> Bank:
    rank = padded_rank(20)
    numbers = torch.zeros(len(changes), rank, len(SIZES) * INPUTS + OUTPUTS, dtype=dtype)
    a, b = numbers.to(device).split((len(SIZES) * INPUTS, OUTPUTS), dim=-1)
    a = a.unflatten(-1, (len(SIZES), INPUTS))
    for index, each in enumerate(changes):
        fill(a[index], b[index], each, FIRSTS)
    blocks = torch.tensor(make_blocks(SIZES), dtype=torch.int32)
    return Bank(a, b, blocks.to(device))


def ints(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(array.astype(np.int32)).to(device)


def rows_of(case: Case, device: torch.device) -> tuple[AdapterRows, np.ndarray]:
    """And the adapter of each token."""
    slots = np.arange(case.num_decoding + len(case.nums))
    widths = [case.width] * case.num_decoding + case.nums
    of_tokens = np.repeat(np.array(OF_SLOTS)[slots], widths)
    of_tokens = np.append(of_tokens, np.full(case.spare, -1))
    null = np.full(case.spare, NUM_SLOTS)
    decoding, chunking = slots[: case.num_decoding], slots[case.num_decoding :]
    decode = chunks = None
    if case.num_decoding:
        own = ints(np.append(decoding, null), device)
        decode = DecodeRows(case.width, own, torch.zeros_like(own), own)
    if case.nums:
        nums = np.array(case.nums + [case.spare] * bool(case.spare))
        starts = case.num_decoding * case.width + np.concatenate([[0], np.cumsum(nums)])
        tile_rows, tile_starts = make_tiles(nums)
        chunks = ChunkRows(
            slots=ints(np.append(chunking, null[: len(nums) - len(chunking)]), device),
            token_starts=ints(starts, device),
            starts=ints(np.zeros(len(nums)), device),
            tile_rows=ints(tile_rows, device),
            tile_starts=ints(tile_starts, device),
            host_starts=np.zeros(len(nums), np.int64),
            host_token_starts=starts,
        )
    return AdapterRows(ints(np.array([*OF_SLOTS, -1]), device), decode, chunks), of_tokens


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_row_has_the_deltas_of_its_slot(
    case: Case, dtype: torch.dtype, device: torch.device
) -> None:
    changes, (rows, of_tokens) = draw(dtype), rows_of(case, device)
    bank = bank_of(changes, dtype, device)
    x = torch.randn(case.num_tokens, INPUTS).to(dtype)
    given = torch.randn(case.num_tokens, OUTPUTS)
    y = given.to(device, copy=True)
    add_deltas(y, inner_products(x.to(device), bank, rows), bank, rows, -0.5)
    found = y.cpu()
    wanted = adapt_reference.adapt(given, x, torch.from_numpy(of_tokens), changes, -0.5)
    assert (found - wanted).abs().max() < TOLERANCE[dtype]
    has_none = torch.from_numpy(of_tokens < 0)
    assert torch.equal(found[has_none], given[has_none])
    assert (found[~has_none] != given[~has_none]).any()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_token_has_the_same_deltas_in_any_step(dtype: torch.dtype, device: torch.device) -> None:
    """As a decode row, among drafts, and in a chunk."""
    bank = bank_of(draw(dtype), dtype, device)
    x = torch.randn(8, INPUTS).to(dtype).to(device)
    given = torch.randn(8, OUTPUTS).to(dtype).to(device)
    found = []
    for case in (Case(8, 1, []), Case(1, 8, []), Case(0, 1, [8])):
        rows, _ = rows_of(case, device)
        rows = rows._replace(of_slots=torch.zeros_like(rows.of_slots))
        y = given.clone()
        add_deltas(y, inner_products(x, bank, rows), bank, rows)
        found.append(y)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], given)

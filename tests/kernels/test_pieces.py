"""Rows in pieces, packed and put back, against their bytes one by one."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.pieces import pack, unpack
from kernels.pieces.layout import Pieces, pieces_of
from kernels.pieces.reference import row_of

NUM_ROWS = 7
CASES = {
    "words of 8 bytes": [2048, 4096 * 8, 8],
    "words of 4": [12, 4 * 1025],
    "words of 2": [2, 34, 64],
    "bytes": [3, 1, 1500],
    "one piece": [64],
}
cases = pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)


def sections(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """[rows, size] uint8, one after the other in one memory, as in a KV cache. Bytes between them
    belong to no row."""
    ends, start = [], 0
    for size in sizes:
        start += -(-NUM_ROWS * size // 64) * 64
        ends.append(start)
    memory = torch.randint(0, 256, (start,), dtype=torch.uint8).to(device)
    starts = [0, *ends[:-1]]
    return [
        memory[at : at + NUM_ROWS * size].view(NUM_ROWS, size)
        for at, size in zip(starts, sizes, strict=True)
    ]


def states(device: torch.device) -> list[Tensor]:
    """Parts of rows of one memory, with padding between them, as states lie."""
    memory = torch.randn(NUM_ROWS, 200).to(device)
    return [memory[:, 32:96].unflatten(1, (2, 4, 8)), memory[:, 128:158].unflatten(1, (3, 10))]


def assert_moves(tensors: list[Tensor], device: torch.device) -> None:
    pieces = pieces_of(tensors)
    wanted = [row_of(tensors, row) for row in range(NUM_ROWS)]
    assert pieces.row_bytes == len(wanted[0])
    memory = pieces.memory.clone()
    buffer = torch.zeros(4 * pieces.row_bytes + 64, dtype=torch.uint8, device=device)
    packed = pieces.packed(3, buffer)
    pack(pieces, torch.tensor([5, 0, 5], device=device), packed)
    assert bytes_of(packed) == [wanted[5], wanted[0], wanted[5]]
    assert not buffer[3 * pieces.row_bytes :].any()
    assert torch.equal(pieces.memory, memory)
    unpack(pieces, torch.tensor([1, 6, 2], device=device), packed)
    expected = [wanted[row] for row in (0, 5, 5, 3, 4, 5, 0)]
    assert [row_of(tensors, row) for row in range(NUM_ROWS)] == expected
    put_back(pieces, wanted, device)
    assert torch.equal(pieces.memory, memory), "other bytes stay"


def bytes_of(packed: Tensor) -> list[bytes]:
    return [row_of([packed], row) for row in range(len(packed))]


def put_back(pieces: Pieces, rows: Sequence[bytes], device: torch.device) -> None:
    content = torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).to(device)
    unpack(pieces, torch.arange(NUM_ROWS, device=device), pieces.packed(NUM_ROWS, content))


@cases
def test_rows_of_sections_are_packed_and_put_back(sizes: list[int], device: torch.device) -> None:
    assert_moves(sections(sizes, device), device)


def test_parts_of_rows_are_packed_and_put_back(device: torch.device) -> None:
    assert_moves(states(device), device)


def test_words_are_as_large_as_the_pieces_allow(device: torch.device) -> None:
    found = [pieces_of(sections(sizes, device)).memory.itemsize for sizes in CASES.values()]
    assert found == [8, 4, 2, 1, 8]

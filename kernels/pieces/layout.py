"""The places of rows in pieces."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import torch
from torch import Tensor

WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True, eq=False)
class Pieces:
    """The rows of P tensors, parts of one memory."""

    memory: Tensor  # [all words of the memory]
    # [P, 4] int64: the first word of row 0, the words from a row to the next one, the words of a
    # row, and the first one of these in a packed row.
    table: np.ndarray
    device_table: Tensor

    @property
    def num_words(self) -> int:
        """Of a packed row."""
        return int(self.table[:, 2].sum())

    @property
    def row_bytes(self) -> int:
        return self.num_words * self.memory.itemsize

    def packed(self, num: int, buffer: Tensor) -> Tensor:
        """The first bytes of ``buffer`` [bytes] uint8 as ``num`` packed rows [num, words]."""
        return buffer[: num * self.row_bytes].view(self.memory.dtype).view(num, -1)


def pieces_of(tensors: Sequence[Tensor]) -> Pieces:
    """The rows of ``tensors`` [rows, ...], of one storage. Each row is contiguous."""
    storage = tensors[0].untyped_storage()
    table = np.array(
        [
            (
                each.data_ptr() - storage.data_ptr(),
                each.stride(0) * each.itemsize,
                each[0].nbytes,
            )
            for each in tensors
        ]
    )
    size = gcd(8, storage.nbytes(), *table.flatten().tolist())
    memory = torch.empty(0, dtype=WORDS[size], device=tensors[0].device)
    memory.set_(storage, 0, (storage.nbytes() // size,))  # type: ignore[call-overload]
    ends = table[:, 2].cumsum()
    table = np.column_stack([table, ends - table[:, 2]]) // size
    return Pieces(memory, table, torch.from_numpy(table).to(memory.device))

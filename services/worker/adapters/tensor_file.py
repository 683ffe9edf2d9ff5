"""A safetensors file that is read, not mapped: a mapped one would end the process if it was cut off
meanwhile."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from shared.errors import ConfigError

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LENGTH_BYTES = 8
MAX_HEADER_BYTES = 16 << 20


class Stored(NamedTuple):
    """``start``: its first byte in the file."""

    dtype: torch.dtype
    shape: list[int]
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class TensorFile:
    """``tensors`` by name. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.tensors = dict(self._entries())
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._bad(str(error)) from None

    def read(self, name: str) -> Tensor:
        stored = self.tensors[name]
        return self._read(stored, stored.start, stored.shape)

    def rows(self, name: str, num: int) -> Iterator[Tensor]:
        """Up to ``num`` rows at a time."""
        stored = self.tensors[name]
        total, *rest = stored.shape
        row_bytes = stored.num_bytes // total
        for first in range(0, total, num):
            shape = [min(num, total - first), *rest]
            yield self._read(stored, stored.start + first * row_bytes, shape)

    def _read(self, stored: Stored, start: int, shape: list[int]) -> Tensor:
        data = bytearray(math.prod(shape) * stored.dtype.itemsize)
        with self.path.open("rb") as file:
            file.seek(start)
            if file.readinto(data) < len(data):
                raise self._bad("it was cut off")
        return torch.frombuffer(data, dtype=stored.dtype).reshape(shape)

    def _entries(self) -> Iterator[tuple[str, Stored]]:
        header, begin = self._header()
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        place = 0
        decoded = {name: msgspec.json.decode(each, type=_Entry) for name, each in entries.items()}
        for name, each in sorted(decoded.items(), key=lambda item: item[1].data_offsets):
            if each.dtype not in DTYPES:
                supported = ", ".join(DTYPES)
                raise ConfigError(f"tensor {name} is {each.dtype}; {supported} are supported")
            if min(each.shape, default=1) < 1:
                raise ConfigError(f"tensor {name} is {each.shape}: it is empty")
            stored = Stored(DTYPES[each.dtype], each.shape, begin + place)
            if each.data_offsets != (place, place + stored.num_bytes):
                raise self._bad(f"the place of tensor {name} does not fit its shape")
            place += stored.num_bytes
            yield name, stored
        if begin + place != self.path.stat().st_size:
            raise self._bad("its tensors are not all of it")

    def _header(self) -> tuple[bytes, int]:
        """With the end of it."""
        with self.path.open("rb") as file:
            num = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if num > MAX_HEADER_BYTES:
                raise self._bad(f"its header has {num} bytes; the limit is {MAX_HEADER_BYTES}")
            return file.read(num), LENGTH_BYTES + num

    def _bad(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.path.name} is not a valid safetensors file: {reason}")

"""The tensors of a GGUF file as a checkpoint's, by our names: its folder lists them."""

import mmap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from services.worker.weights.checkpoint import StoredTensor
from shared.errors import ConfigError
from shared.formats.gguf.families import Entry
from shared.formats.gguf.file import BLOCKS, DENSE
from shared.formats.gguf.folder import TENSORS_FILE

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Rows:
    """A tensor in a mapped file, as safetensors shows one: quantized rows are bytes."""

    def __init__(self, content: Tensor, entry: Entry) -> None:
        *outer, inner = entry.shape
        block, self._entry = BLOCKS[entry.kind], entry
        self._shape = [*outer, inner // block.size * block.num_bytes]
        size = torch.Size(self._shape).numel()
        self._bytes = content[entry.start : entry.start + size]
        if len(self._bytes) < size:
            raise ValueError(f"tensor {entry.name} is not complete")
        if entry.kind in DENSE:
            self._shape = entry.shape

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        whole = self._bytes
        if self._entry.kind in DENSE:
            is_aligned = whole.data_ptr() % DTYPES[self._entry.kind].itemsize == 0
            whole = (whole if is_aligned else whole.clone()).view(DTYPES[self._entry.kind])
        whole = whole.view(self._shape)
        if self._entry.heads:
            pairs = whole.unflatten(0, (self._entry.heads, -1, 2))
            whole = pairs.transpose(1, 2).flatten(0, 2)
        if self._entry.offset:
            whole = whole - self._entry.offset
        part: Tensor = whole[index]
        return part


def tensors(file: Path) -> Iterator[StoredTensor]:
    """Raises ConfigError if the file is not complete any more."""
    entries = msgspec.json.decode((file.parent / TENSORS_FILE).read_bytes(), type=list[Entry])
    own, path = [each for each in entries if each.file == file.name], file.resolve()
    if not own:
        return
    try:
        with path.open("rb") as stream:
            mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it cannot be written: it never is
            content = torch.frombuffer(mapped, dtype=torch.uint8)
        yield from [StoredTensor(path, each.name, Rows(content, each)) for each in own]
    except (OSError, ValueError) as error:
        raise ConfigError(f"model: {path}: {error}") from None

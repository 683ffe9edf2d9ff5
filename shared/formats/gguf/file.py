"""The header of a GGUF file (versions 2 and 3): metadata, and the places of tensors.

Nothing is trusted: each count is checked against the bytes that are left.
"""

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import ConfigError

MAGIC = b"GGUF"
SUFFIX = ".gguf"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MIN_ENTRY_BYTES = 8 + 4 + 1  # of metadata: the length of a name, a type, a value
MIN_INFO_BYTES = 8 + 4 + 4 + 8  # of a tensor: also its number of dimensions, type and offset

# Formats of single values in metadata, by their type.
NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9


class Block(NamedTuple):
    """``size`` adjacent elements of a row, in ``num_bytes``."""

    size: int
    num_bytes: int


DENSE = {"F32": Block(1, 4), "F16": Block(1, 2), "BF16": Block(1, 2)}
QUANTIZED = {
    "Q4_0": Block(32, 18),
    "Q4_1": Block(32, 20),
    "Q5_0": Block(32, 22),
    "Q5_1": Block(32, 24),
    "Q8_0": Block(32, 34),
    "Q4_K": Block(256, 144),
    "Q5_K": Block(256, 176),
    "Q6_K": Block(256, 210),
}
BLOCKS = DENSE | QUANTIZED
_KINDS_FROM_0 = "F32 F16 Q4_0 Q4_1 - - Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K"
_KINDS_FROM_16 = "IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL IQ3_S IQ2_S IQ4_XS"
_KINDS_FROM_24 = "I8 I16 I32 I64 F64 IQ1_M BF16"
KINDS = dict(enumerate(f"{_KINDS_FROM_0} {_KINDS_FROM_16} {_KINDS_FROM_24}".split()))
KINDS |= {34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"}


class StoredBlocks(NamedTuple):
    """A tensor of a file: its ``shape`` has the last dimension innermost, as torch's has; ``start``
    is its first byte in the file."""

    kind: str
    shape: list[int]
    start: int


def linked_name(path: Path) -> str:
    """The name of a link to ``path`` that readers of weights know by its end."""
    return f"{path.name.removesuffix(SUFFIX)}{SUFFIX}"


class GgufFile:
    """``metadata`` by key, and ``tensors`` by name. Raises ConfigError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredBlocks] = {}
        try:
            with path.open("rb") as stream:
                self._size = path.stat().st_size
                if stream.read(4) != MAGIC:
                    raise self.wrong("it does not begin with GGUF")
                with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    self._read(_Cursor(content))
        except OSError as error:
            raise self.wrong(f"cannot be read: {error.strerror}") from None

    def wrong(self, problem: str) -> ConfigError:
        return ConfigError(f"model: {self.path}: {problem}")

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of ``key`` as ``kind``. Raises ConfigError for another type."""
        if key not in self.metadata:
            return default
        try:
            return msgspec.convert(self.metadata[key], kind, strict=kind is not float)
        except msgspec.ValidationError as error:
            raise self.wrong(f"metadata {key}: {error}") from None

    def require(self, key: str, kind: type) -> Any:
        if key not in self.metadata:
            raise self.wrong(f"metadata {key} is missing")
        return self.get(key, kind)

    def floats(self, stored: StoredBlocks) -> list[float]:
        """The numbers of a small tensor of F32."""
        num = math.prod(stored.shape)
        with self.path.open("rb") as stream:
            stream.seek(stored.start)
            return [*struct.unpack(f"<{num}f", stream.read(4 * num))]

    def _read(self, cursor: "_Cursor") -> None:
        version, num_tensors, num_entries = self._part("the header", cursor.header)
        if version not in VERSIONS:
            is_big = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            raise self.wrong(
                "big-endian files are not supported"
                if is_big
                else f"version {version} is not supported; supported are {list(VERSIONS)}"
            )
        self._check_num("keys", num_entries, MIN_ENTRY_BYTES, cursor)
        for number in range(num_entries):
            name = self._part(f"the name of key {number}", cursor.text)
            value = self._part(f"metadata {name}", cursor.value)
            if name in self.metadata:
                raise self.wrong(f"metadata {name} is there twice")
            self.metadata[name] = value
        self._check_num("tensors", num_tensors, MIN_INFO_BYTES, cursor)
        infos = {}
        for number in range(num_tensors):
            name = self._part(f"the name of tensor {number}", cursor.text)
            if name in infos:
                raise self.wrong(f"tensor {name} is there twice")
            infos[name] = self._part(f"tensor {name}", cursor.tensor)
        alignment = self.get("general.alignment", int, DEFAULT_ALIGNMENT)
        if not 0 < alignment <= 1 << 20 or alignment & alignment - 1:
            raise self.wrong(f"metadata general.alignment {alignment} is no power of 2")
        start = -(-cursor.at // alignment) * alignment
        for name, (shape, kind, offset) in infos.items():
            self.tensors[name] = self._placed(name, shape, kind, start + offset)

    def _placed(self, name: str, shape: list[int], number: int, start: int) -> StoredBlocks:
        kind = KINDS.get(number, str(number))
        if kind not in BLOCKS:
            raise self.wrong(
                f"tensor {name} has type {kind}, which is not supported; supported are"
                f" {', '.join(BLOCKS)}"
            )
        block = BLOCKS[kind]
        if kind in QUANTIZED and len(shape) < 2:
            raise self.wrong(f"tensor {name} of one dimension has type {kind}")
        if shape[-1] % block.size:
            raise self.wrong(f"tensor {name} {shape}: {kind} has blocks of {block.size}")
        num_bytes = math.prod(shape) // block.size * block.num_bytes
        if start + num_bytes > self._size:
            raise self.wrong(
                f"tensor {name} ends at byte {start + num_bytes}, the file at {self._size}:"
                " it is not complete"
            )
        return StoredBlocks(kind, shape, start)

    def _check_num(self, things: str, num: int, min_bytes: int, cursor: "_Cursor") -> None:
        if num > cursor.left // min_bytes:
            raise self.wrong(f"{num} {things} do not fit in {cursor.left} bytes: it is damaged")

    def _part(self, name: str, read: Callable[[], Any]) -> Any:
        try:
            return read()
        except (struct.error, ValueError) as error:
            raise self.wrong(f"{name} is damaged or not complete: {error}") from None


class _Cursor:
    """Reads one thing after the other; raises struct.error or ValueError."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self.at = len(MAGIC)

    @property
    def left(self) -> int:
        return len(self._content) - self.at

    def header(self) -> tuple[int, int, int]:
        return self._number("I"), self._number("Q"), self._number("Q")

    def text(self) -> str:
        size = self._number("Q")
        if size > self.left:
            raise ValueError(f"a text of {size} bytes where {self.left} are left")
        self.at += size
        return self._content[self.at - size : self.at].decode()

    def value(self) -> Any:
        return self._value(self._number("I"))

    def tensor(self) -> tuple[list[int], int, int]:
        num_dims = self._number("I")
        if not 0 < num_dims <= MAX_DIMS:
            raise ValueError(f"{num_dims} dimensions")
        shape = [self._number("Q") for _ in range(num_dims)]
        if not all(0 < each < 1 << 40 for each in shape):
            raise ValueError(f"dimensions {shape}")
        return shape[::-1], self._number("I"), self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self.text()
        if kind == ARRAY:
            return self._array()
        if kind not in NUMBERS:
            raise ValueError(f"type {kind} of a value")
        return self._number(NUMBERS[kind])

    def _array(self) -> list[Any]:
        kind, num = self._number("I"), self._number("Q")
        if kind == TEXT:
            min_bytes = 8
        elif kind in NUMBERS:
            min_bytes = struct.calcsize(f"<{NUMBERS[kind]}")
        else:
            raise ValueError(f"an array of type {kind}")
        if num > self.left // min_bytes:
            raise ValueError(f"{num} elements where {self.left} bytes are left")
        if kind == TEXT:
            return [self.text() for _ in range(num)]
        values = struct.unpack_from(f"<{num}{NUMBERS[kind]}", self._content, self.at)
        self.at += num * min_bytes
        return [*values]

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._content, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

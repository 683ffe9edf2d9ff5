"""Attention to heads in native code: near float64 for every source of keys and values, and the same
bits in any steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from kernels.cpu.library import load_library
from kernels.cpu.operators import Kind, Operator, PackedHeads
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, KVPair, NativeProgram
from kernels.kv_codes import HIGHEST_CODE
from kernels.paged_attention import prepare_attention
from tests.services.worker.builds import each_variant

CPU = torch.device("cpu")
BLOCK_SIZE, MAX_LEN, EPS = 16, 320, 1e-6
LENGTHS = (290, 35, 1)  # one with two splits of keys
NUM_SUMS = 48  # of a token's outputs
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.int8: 0.05, torch.uint8: 0.3}


@dataclass(frozen=True)
class Shape:
    """Two layers: the second has queries alone and reads the keys and values of the first, which
    may lack values of its own."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    norms_values: bool = True
    has_values: bool = True

    @property
    def size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def width(self) -> int:
        return self.size + (1 + self.has_values) * self.num_kv_heads * self.head_dim


SHAPES = [
    Shape(4, 1, 512),
    Shape(6, 2, 512, has_values=False),
    Shape(3, 3, 272, window=40),
    Shape(2, 1, 64, norms_values=False, has_values=False),
    Shape(2, 2, 16, window=270, norms_values=False),
]


class Row(NamedTuple):
    """A sequence, and the place of its first block."""

    given: Tensor  # [L, width]
    queries: Tensor  # [L, size], of the second layer
    first_block: int


class Case:
    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(1)
        self.shape, dim = shape, shape.head_dim
        self.rows = [
            Row(
                torch.randn(length, shape.width, generator=generator),
                torch.randn(length, shape.size, generator=generator),
                number * (MAX_LEN // BLOCK_SIZE + 1),
            )
            for number, length in enumerate(LENGTHS)
        ]
        paces = torch.zeros(dim // 2)  # a share of the pairs is rotated
        paces[: dim // 8] = 100.0 ** -(torch.arange(dim // 8) * 2 / dim)
        angles = torch.outer(torch.arange(MAX_LEN).float(), paces)
        self.cos = torch.cat((angles.cos(), angles.cos()), 1)
        self.sin = torch.cat((-angles.sin(), angles.sin()), 1)
        signs = torch.randn(NUM_SUMS, shape.size, generator=generator).sign()
        self.signs = signs * 2.0 ** -(shape.size.bit_length() // 2)
        self.norms = [1 + 0.2 * torch.randn(dim, generator=generator) for _ in range(2)]

    def program(self, library: NativeLibrary) -> NativeProgram:
        """[T, width] and [T, size] → sums of the outputs of both layers, [T, 2 · NUM_SUMS]"""
        shape, size, narrow = self.shape, self.shape.size, library.dtype
        heads = PackedHeads(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
            cos=self.cos,
            sin=self.sin,
            is_interleaved=False,
            window=shape.window,
            softcap=None,
            sinks=None,
            query_norm=self.norms[0],
            key_norm=self.norms[1],
            norms_tokens=False,
            eps=EPS,
        )
        sums = library.pack(self.signs)
        operators = [
            Operator(
                kind=Kind.ATTEND,
                source=0,
                second=2,
                out=3,
                size=shape.width,
                num=int(shape.norms_values),
                heads=heads,
            ),
            Operator(kind=Kind.LINEAR, source=3, out=5, size=size, weight=sums),
            Operator(kind=Kind.ATTEND, source=1, second=2, out=4, size=size, heads=heads),
            Operator(kind=Kind.LINEAR, source=4, out=6, size=size, weight=sums),
            Operator(kind=Kind.JOIN, source=5, second=6, out=7, size=NUM_SUMS, num=NUM_SUMS),
        ]
        sizes = [
            *((shape.width, torch.float32), (size, torch.float32)),
            *((size, narrow), (size, narrow), (size, narrow)),
            *((each * NUM_SUMS, torch.float32) for each in (1, 1, 2)),
        ]
        return NativeProgram(library, operators, [Buffer(*each) for each in sizes], 2, 7)

    def caches(self, stored: torch.dtype) -> list[KVPair]:
        shape = self.shape
        num_blocks = len(LENGTHS) * (MAX_LEN // BLOCK_SIZE + 1)
        entry = num_blocks, BLOCK_SIZE, 2, shape.num_kv_heads
        scales = torch.full(entry, torch.nan) if stored in HIGHEST_CODE else None
        numbers = torch.empty(*entry, shape.head_dim, dtype=stored)
        return [(numbers if scales is not None else numbers.fill_(torch.nan), scales)]

    def run(
        self,
        library: NativeLibrary,
        stored: torch.dtype,
        step_size: int,
        numbers: Sequence[int] = range(len(LENGTHS)),
    ) -> list[Tensor]:
        """The sums [L, 2 · NUM_SUMS] of these sequences, ``step_size`` tokens of each a step."""
        program, caches = self.program(library), self.caches(stored)
        found: dict[int, list[Tensor]] = {number: [] for number in numbers}
        for start in range(0, max(LENGTHS), step_size):
            rows = {i: self.rows[i] for i in numbers if start < len(self.rows[i].given)}
            ends = [min(start + step_size, len(row.given)) for row in rows.values()]
            parts = [(row, slice(start, end)) for row, end in zip(rows.values(), ends, strict=True)]
            inputs = [
                torch.cat([row.given[part] for row, part in parts]),
                torch.cat([row.queries[part] for row, part in parts]),
            ]
            tables = np.array(
                [row.first_block + np.arange(MAX_LEN // BLOCK_SIZE) for row in rows.values()]
            )
            places = [torch.arange(part.start, part.stop) for _, part in parts]
            slots = [
                row.first_block * BLOCK_SIZE + own
                for row, own in zip(rows.values(), places, strict=True)
            ]
            nums = np.array(ends) - start
            batch = prepare_attention(nums, np.array(ends), tables, BLOCK_SIZE, library.dtype, CPU)
            groups = [(torch.cat(slots), batch)]
            out = program.run(inputs, torch.cat(places), groups, caches).clone()
            for number, part in zip(rows, out.split(nums.tolist()), strict=True):
                found[number].append(part)
        return [torch.cat(each) for each in found.values()]

    def exact(self, row: Row) -> Tensor:
        """The sums [L, 2 · NUM_SUMS] in float64."""
        shape, given = self.shape, row.given.double()
        split = given.unflatten(1, (-1, shape.head_dim))
        key = split[:, shape.num_heads : shape.num_heads + shape.num_kv_heads]
        values = split[:, -shape.num_kv_heads :]
        if shape.norms_values:
            values = functional.rms_norm(values, values.shape[2:], eps=EPS)
        keys = self._turned(key, 1)
        both = (each.unflatten(1, (-1, shape.head_dim)) for each in (given, row.queries.double()))
        outputs = [
            self._attended(self._turned(each[:, : shape.num_heads], 0), keys, values)
            for each in both
        ]
        return torch.cat([each @ self.signs.double().T for each in outputs], 1)

    def _turned(self, heads: Tensor, norm: int) -> Tensor:
        normed = functional.rms_norm(heads, heads.shape[2:], self.norms[norm].double(), EPS)
        cos, sin = (each[: len(heads), None].double() for each in (self.cos, self.sin))
        return normed * cos + normed.roll(self.shape.head_dim // 2, -1) * sin

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        shape, num = self.shape, len(queries)
        keys, values = (
            each.repeat_interleave(shape.num_heads // shape.num_kv_heads, 1)
            for each in (keys, values)
        )
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * shape.head_dim**-0.5
        behind = torch.arange(num)[:, None] - torch.arange(num)
        is_hidden = (behind < 0) | (behind >= (shape.window or num))
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(2)
        return torch.einsum("hqk,khd->qhd", weights, values).flatten(1)


def stored_types() -> Iterator[tuple[torch.dtype, torch.dtype]]:
    for dtype in (torch.float32, torch.bfloat16):
        yield dtype, dtype
    for codes in HIGHEST_CODE:
        yield torch.bfloat16, codes


@each_variant
@pytest.mark.parametrize(("dtype", "stored"), [*stored_types()], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_are_near_float64_and_the_same_bits_in_any_steps_and_company(
    shape: Shape, dtype: torch.dtype, stored: torch.dtype, variant: str
) -> None:
    case, library = Case(shape), NativeLibrary(load_library(variant), dtype, 2)
    whole = case.run(library, stored, max(LENGTHS))
    for row, found in zip(case.rows, whole, strict=True):
        tolerance = TOLERANCES[stored]
        torch.testing.assert_close(found.double(), case.exact(row), atol=tolerance, rtol=tolerance)
    for step_size in (1, 7, 64):
        parts = case.run(library, stored, step_size)
        assert all(torch.equal(*pair) for pair in zip(parts, whole, strict=True)), step_size
    (alone,) = case.run(library, stored, 13, [0])
    assert torch.equal(alone, whole[0])

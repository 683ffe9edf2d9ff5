"""short_conv against its reference, by rows on the host and on a device."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.paged_attention import AttentionBatch, DeviceAttention, prepare_attention
from kernels.short_conv import previous_places, reference, short_conv
from tests.kernels.attended import MAX_BLOCKS, Step, device_attention
from tests.kernels.strided import apart

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
ENTRY = (2, 2, 8)
STEPS = [
    Step([0, 1, 2, 3, 30], 1),
    Step([0, 5], 3),
    Step([], 1, [(0, 1), (0, 9), (1, 2), (17, 6)]),
    Step([4, 0, 31], 2, [(3, 1), (12, 30)], block_size=16),
]
steps = pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))


class Paged:
    """Sequences of random inputs x [tokens, 3 · size], of which ``step`` computes the last ones."""

    def __init__(self, step: Step, size: int, dtype: torch.dtype) -> None:
        self.step, self.size = step, size
        num_parts = -(-size // math.prod(ENTRY))
        num_blocks = len(step.rows) * MAX_BLOCKS
        tables = torch.randperm(num_blocks).view(-1, MAX_BLOCKS)
        self.tables = tables.numpy()
        shape = num_blocks + 1, step.block_size, *ENTRY
        empty = torch.full(shape, math.nan, dtype=dtype)
        self.caches = [apart(empty) for _ in range(num_parts)]
        self.inputs = [
            torch.randn(before + num, 3 * size).to(dtype) for before, num in step.rows.tolist()
        ]

    def expected(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Writes the entries of earlier tokens, too."""
        outputs, nothing = [], torch.zeros(0, self.size, dtype=self.caches[0].dtype)
        for row, (before, _) in enumerate(self.step.rows.tolist()):
            output, entries = reference.short_conv(self.inputs[row], weight, bias, nothing)
            outputs.append(output[before:])
            for position in range(before):
                self._write(self._place(row, position), entries[position])
        return torch.cat(outputs)

    def actual(
        self, weight: Tensor, bias: Tensor | None, attention: AttentionBatch | DeviceAttention
    ) -> Tensor:
        parts = zip(self.inputs, self.step.rows[:, 0].tolist(), strict=True)
        x = torch.cat([whole[before:] for whole, before in parts])
        rows = enumerate(self.step.rows.tolist())
        places = [
            self._place(row, position)
            for row, (before, num) in rows
            for position in range(before, before + num)
        ]
        slots = torch.tensor(places, dtype=torch.int64)
        before = previous_places(attention, len(x), weight.shape[1] - 1)
        return short_conv(x, weight, bias, self.caches, slots, before)

    @property
    def on_host(self) -> AttentionBatch:
        before, nums = self.step.rows.T
        dtype, device = self.caches[0].dtype, torch.device("cpu")
        size = self.step.block_size
        return prepare_attention(nums, before + nums, self.tables, size, dtype, device)

    def _place(self, row: int, position: int) -> int:
        number, offset = divmod(position, self.step.block_size)
        return int(self.tables[row, number]) * self.step.block_size + offset

    def _write(self, place: int, entry: Tensor) -> None:
        part = math.prod(ENTRY)
        for cache, numbers in zip(self.caches, entry.split(part), strict=True):
            block, offset = divmod(place, self.step.block_size)
            cache.flatten(2)[block, offset, : len(numbers)] = numbers


@steps
@pytest.mark.parametrize(("width", "size"), [(1, 16), (3, 32), (5, 80)])
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_each_token_sees_the_last_columns_of_its_sequence(
    step: Step, width: int, size: int, dtype: torch.dtype, on_device: bool
) -> None:
    torch.manual_seed(width + size)
    weight, bias = torch.randn(size, width).to(dtype), torch.randn(size).to(dtype)
    paged = Paged(step, size, dtype)
    for own_bias in (None, bias):
        expected = paged.expected(weight, own_bias)
        attention = device_attention(step, paged.tables) if on_device else paged.on_host
        actual = paged.actual(weight, own_bias, attention)
        tolerance = TOLERANCES[dtype]
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def test_a_column_is_rounded_before_it_is_used() -> None:
    """So that a chunk's end changes no bit."""
    torch.manual_seed(0)
    weight = torch.randn(16, 3).bfloat16()
    whole, parts = (Paged(Step([], 1, [(0, 12)]), 16, torch.bfloat16) for _ in range(2))
    parts.inputs = whole.inputs
    parts.tables = whole.tables
    at_once = whole.actual(weight, None, whole.on_host)
    found = []
    for first, num in ((0, 5), (5, 1), (6, 6)):
        parts.step, parts.inputs = Step([], 1, [(first, num)]), [whole.inputs[0][: first + num]]
        found.append(parts.actual(weight, None, parts.on_host))
    assert torch.equal(torch.cat(found), at_once)


def test_no_tokens_are_no_output() -> None:
    paged = Paged(Step([], 1, [(0, 0)]), 16, torch.float32)
    weight = torch.randn(16, 3)
    assert paged.actual(weight, None, paged.on_host).shape == (0, 16)
    assert np.isnan(paged.caches[0].numpy()).all()

"""The choice of keys by torch against its reference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.index import IndexNorm, IndexSpec, choose_keys, reference, write_index_keys
from kernels.paged_attention import prepare_attention
from tests.kernels.attended import MAX_BLOCKS, Step
from tests.kernels.rotations import rotation_table

CPU = torch.device("cpu")
STEPS = [
    Step([0, 3, 9, 37], 1, [(0, 20), (20, 3)]),
    Step([12, 60], 1, block_size=16),
    Step([], 1, [(0, 5), (3, 4)]),  # no row has more keys than are chosen
    Step([40], 1, [(2, 30), (30, 9)], hides=True),
]


def spec_with(topk: int, *, is_interleaved: bool = False) -> IndexSpec:
    return IndexSpec(3, 24, 8, topk, is_interleaved, 1e-6)


class Steps:
    """Keys of a step's rows in a cache, with NaN where none is, and its tokens."""

    def __init__(self, step: Step, spec: IndexSpec) -> None:
        starts, num_tokens = step.rows.T
        num_keys, num_rows = starts + num_tokens, len(starts)
        tables = np.random.default_rng(0).permutation(num_rows * MAX_BLOCKS).reshape(num_rows, -1)
        size = step.block_size
        self.cache = torch.full((num_rows * MAX_BLOCKS + 1, size, 1, 1, spec.dim), torch.nan)
        self.attention = prepare_attention(
            num_tokens, num_keys, tables, size, torch.float32, CPU, step.first_keys
        )
        self.rows = np.repeat(np.arange(num_rows), num_tokens)
        pairs = zip(starts, num_keys, strict=True)
        self.positions = np.concatenate([np.arange(*each) for each in pairs])
        self._tables, self._size = tables, size
        for row, start in enumerate(starts):
            places = self.slots(row, np.arange(start))
            self.cache.view(-1, spec.dim)[places] = torch.randn(start, spec.dim)
        self.own = torch.cat(
            [self.slots(*each) for each in zip(self.rows, self.positions[:, None], strict=True)]
        )

    def slots(self, row: Any, keys: np.ndarray) -> Tensor:
        return torch.from_numpy(
            self._tables[row, keys // self._size] * self._size + keys % self._size
        )


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("step", STEPS, ids=range(len(STEPS)))
def test_any_step_chooses_like_the_reference(step: Step, is_interleaved: bool) -> None:
    spec = spec_with(9, is_interleaved=is_interleaved)
    steps = Steps(step, spec)
    total = len(steps.rows)
    query, weights = torch.randn(total, spec.num_heads * spec.dim), torch.randn(total, 3)
    key, norm = torch.randn(total, spec.dim), IndexNorm(torch.rand(spec.dim), torch.randn(spec.dim))
    rotation = rotation_table(total, spec.rope_dim, is_interleaved)
    write_index_keys(key, norm, rotation, steps.own, steps.cache, spec)
    found = choose_keys(query, weights, rotation, steps.cache, steps.attention, spec)
    flat = steps.cache.view(-1, spec.dim)
    first_keys = [0] * len(step.rows) if step.first_keys is None else step.first_keys.tolist()
    for token, (row, position) in enumerate(zip(steps.rows, steps.positions, strict=True)):
        entry = reference.index_key(key[token], norm, rotation[:, token], spec)
        torch.testing.assert_close(flat[steps.own[token]], entry)
        keys = flat[steps.slots(row, np.arange(position + 1))]
        expected = reference.choose(
            query[token], weights[token], rotation[:, token], keys, first_keys[row], spec
        )
        if found.shape[1]:
            assert found[token].nonzero().flatten().tolist() == expected
    assert bool(found.shape[1]) == (steps.positions.max() >= spec.topk)


def test_of_equal_scores_the_first_keys_are_chosen_and_never_no_number() -> None:
    spec = spec_with(4)
    steps = Steps(Step([11], 1), spec)
    cache = steps.cache.nan_to_num(1.0)
    rotation = rotation_table(1, spec.rope_dim, False)
    nothing = torch.zeros(1, 3 * spec.dim), torch.ones(1, 3)
    found = choose_keys(*nothing, rotation, cache, steps.attention, spec)
    assert found.nonzero()[:, 1].tolist() == [0, 1, 2, 3]
    cache.view(-1, spec.dim)[steps.slots(0, np.array([1, 2]))] = torch.nan
    found = choose_keys(*nothing, rotation, cache, steps.attention, spec)
    assert found.nonzero()[:, 1].tolist() == [0, 3, 4, 5]

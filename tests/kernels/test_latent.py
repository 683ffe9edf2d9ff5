"""Latent attention against its reference, which materializes keys and values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.kv_codes import HIGHEST_CODE
from tests.kernels.attended import Step
from tests.kernels.latents import SMALL, TOLERANCES, Shape, compare

each_codes = pytest.mark.parametrize("codes", HIGHEST_CODE, ids=str)
dtypes = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
DEEPSEEK_V3 = Shape(128, 512, 128, 64, 128)
GROUPS = Shape(3, 160, 16, 16, 24)  # the second group of latents is smaller
SHAPES = [Shape(1, 16, 16, 16, 16), Shape(3, 40, 24, 8, 40), Shape(20, 64, 16, 32, 16)]


@settings(max_examples=40)
@given(
    step=st.builds(
        Step,
        starts=st.lists(st.integers(0, 40), max_size=4),
        width=st.integers(1, 5),
        chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 40)), max_size=3),
        block_size=st.sampled_from([3, 4, 16]),
        hides=st.booleans(),
        together=st.just(0),
    ).filter(lambda step: step.starts or step.chunks),
    is_interleaved=st.booleans(),
)
def test_any_step_agrees(step: Step, is_interleaved: bool) -> None:
    compare(step, SMALL, is_interleaved=is_interleaved)


@dtypes
@pytest.mark.parametrize("hides", [False, True])
def test_steps_that_the_host_prepared_agree(hides: bool, dtype: torch.dtype) -> None:
    step = Step([0, 3, 37], 1, [(0, 20), (20, 3)], hides=hides)
    compare(step, SMALL, dtype, knows_lengths=True)
    compare(step, SMALL, dtype, knows_lengths=True, is_interleaved=True)


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_agrees(device: torch.device, shape: Shape, dtype: torch.dtype) -> None:
    step = Step([0, 37], 2, [(0, 20), (20, 3)])
    compare(step, shape, dtype, is_interleaved=True, device=device)


@dtypes
@pytest.mark.parametrize("start", [0, 15, 16, 33])
@pytest.mark.parametrize("width", [1, 3])
def test_edges_of_blocks_and_tiles_agree(
    device: torch.device, start: int, width: int, dtype: torch.dtype
) -> None:
    compare(Step([start, 0], width, [(start, 17)], 16), SMALL, dtype, device=device)


@pytest.mark.parametrize(
    ("shape", "dtype", "codes"),
    [(SMALL, torch.float32, torch.uint8), (GROUPS, torch.bfloat16, torch.int8)],
    ids=str,
)
def test_quantized_latents_agree(
    device: torch.device, shape: Shape, dtype: torch.dtype, codes: torch.dtype
) -> None:
    step = Step([0, 37], 2, [(12, 9), (20, 3)], hides=True)
    compare(step, shape, dtype, is_interleaved=True, device=device, codes=codes)


@each_codes
@dtypes
def test_quantized_latents_agree_in_steps_that_the_host_prepared(
    dtype: torch.dtype, codes: torch.dtype
) -> None:
    step = Step([0, 3, 37], 1, [(0, 20), (20, 3)], hides=True)
    compare(step, GROUPS, dtype, knows_lengths=True, codes=codes)


def test_rows_that_hide_keys_agree(device: torch.device) -> None:
    step = Step([5, 40], 2, [(12, 20), (20, 3)], hides=True)
    compare(step, SMALL, is_interleaved=True, device=device)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
def test_heads_of_the_size_of_deepseek_v3_agree(device: torch.device, dtype: torch.dtype) -> None:
    step = Step([70], 1, [(5, 2)], 16)
    compare(step, DEEPSEEK_V3, dtype, is_interleaved=True, device=device)

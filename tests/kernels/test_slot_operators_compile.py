"""The kernels of a step's slots, compiled for simulated GPUs."""

from typing import Any

import pytest
import triton

from kernels.accept.triton import accept_kernel
from kernels.decode_inputs.triton import decode_inputs_kernel
from kernels.mtp_inputs.triton import draft_pairs_kernel, step_pairs_kernel
from kernels.store_drafts.triton import store_drafts_kernel
from shared.wire.messages import MAX_GROUPS
from tests.kernels.compiled import ARCHS, compile_kernel

WIDTHS = [1, 4, 6, 17]
MAX_BLOCKS = 2560  # of 16 tokens: Qwen3-8B's full context
NUM_SLOTS = 257
INT64S = {"p_tokens", "p_positions", "p_slot_mapping", "p_seeds", "p_lasts", "p_targets"}
FLOATS = {"p_logprobs", "p_draft_logprobs", "p_acceptance"}
MAX_REGISTERS = 128  # of the hardware's 255 per thread

archs = pytest.mark.parametrize("arch", ARCHS)
groups = pytest.mark.parametrize("num_groups", [1, MAX_GROUPS])
widths = pytest.mark.parametrize("width", WIDTHS)


def assert_fits(kernel: Any, constants: dict[str, Any], arch: int) -> None:
    """One warp with everything in registers. A row's tokens lie next to each other."""
    if "token_step" in kernel.arg_names:
        constants = constants | {"token_step": 1}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = {name: _kind(name) for name in names}
    found = compile_kernel(kernel, signature, constants, arch, num_warps=1)
    assert found.num_stack_bytes == 0
    assert found.num_registers <= MAX_REGISTERS
    assert found.shared_bytes <= 1 << 10


def _kind(name: str) -> str:
    if name.startswith("p_"):
        return "*i64" if name in INT64S else "*fp32" if name in FLOATS else "*i32"
    return "i32"


def tables(num_groups: int) -> dict[str, int | tuple[int, int]]:
    return {"NUM_GROUPS": num_groups, "TABLE_STRIDES": (NUM_SLOTS * MAX_BLOCKS, MAX_BLOCKS)}


def wide(width: int) -> dict[str, int]:
    return {"WIDTH": width, "BLOCK_W": triton.next_power_of_2(width)}


@archs
@widths
@groups
def test_inputs_of_rows_that_decode_fit(num_groups: int, width: int, arch: int) -> None:
    constants = {"MAX_IDS": width, "BLOCK_SIZE": 16, **tables(num_groups), **wide(width)}
    assert_fits(decode_inputs_kernel, constants, arch)


@archs
@widths
@pytest.mark.parametrize("acceptance", [{}, {"p_acceptance": None}], ids=["declared", "verified"])
def test_acceptance_with_many_stop_ids_fits(
    acceptance: dict[str, None], width: int, arch: int
) -> None:
    ids = {"MAX_IDS": width, "NUM_EOS": 3, "BLOCK_EOS": 4, "NUM_STOPS": 128, "BLOCK_STOPS": 128}
    assert_fits(accept_kernel, {**acceptance, **ids, **wide(width)}, arch)


@archs
@widths
@groups
def test_pairs_of_a_step_fit(num_groups: int, width: int, arch: int) -> None:
    constants = {"BLOCK_SIZE": 16, **tables(num_groups), **wide(width)}
    assert_fits(step_pairs_kernel, constants, arch)


@archs
@groups
def test_pairs_of_drafts_fit(num_groups: int, arch: int) -> None:
    constants = {"MAX_IDS": 6, "BLOCK_SIZE": 16, **tables(num_groups)}
    assert_fits(draft_pairs_kernel, constants, arch)


@archs
def test_storing_drafts_fits(arch: int) -> None:
    assert_fits(store_drafts_kernel, {"MAX_DRAFTS": 5, "LOGPROBS": 5}, arch)

"""The kernel of rows in pieces, compiled for simulated GPUs."""

from typing import Any

import pytest

from kernels.pieces.triton import BLOCK, copy_pieces_kernel
from tests.kernels.compiled import ARCHS, compile_kernel


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("kind", ["*i64", "*i32", "*i16", "*u8"])
@pytest.mark.parametrize("packs", [True, False])
def test_rows_are_copied_in_registers(packs: bool, kind: str, arch: int) -> None:
    signature = {
        "p_memory": kind,
        "p_packed": kind,
        "p_rows": "*i64",
        "p_table": "*i64",
        "num_words": "i32",
    }
    constants: dict[str, Any] = {"PACKS": packs, "BLOCK": BLOCK}
    found = compile_kernel(copy_pieces_kernel, signature, constants, arch, num_warps=4)
    assert found.num_stack_bytes == 0
    assert found.num_registers <= 64
    assert found.shared_bytes == 0

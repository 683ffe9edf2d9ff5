"""The kernels of gated_delta compile for GPUs without spills."""

from typing import Any

import pytest

from kernels.delta.device import CHUNK
from kernels.delta.triton import CHANNELS, CHUNK_KEYS, CHUNK_VALUES, PRECISION, VALUES
from kernels.delta.triton.advance import advance_kernel
from kernels.delta.triton.chunks import pass_kernel, solve_kernel
from kernels.delta.triton.finish import finish_kernel
from kernels.delta.triton.inputs import mix_kernel, note_kernel
from tests.kernels.compiled import ARCHS, compile_kernel
from tests.selection import every_pair, only

# Qwen3-Next, and with twice its sizes of heads.
HEADS = {"NUM_KEYS": 16, "NUM_HEADS": 32}
NUM_CHANNELS = 8192
OF_STATES = ("p_columns", "p_kept", "p_matrices")
OF_TOKENS = ("p_mixed", "p_openings", "p_solved", "p_scores", "p_y")
FLOATS = (
    *(*OF_STATES, *OF_TOKENS, "p_decay", "p_dt_bias", "p_norm", "p_skip"),
    *("p_norms", "p_rotation"),
)
GATED, SCAN, BY_CHANNEL, LIGHTNING = range(4)
each_rule = pytest.mark.parametrize("rule", [GATED, SCAN])
RECURRENCES = (GATED, SCAN, BY_CHANNEL, LIGHTNING)
each_recurrence = pytest.mark.parametrize("rule", RECURRENCES)
ROWS = ("p_slots", "p_starts", "p_token_starts", "p_nums")
OF_ROWS = dict.fromkeys((*ROWS, "p_positions"), "*i32")
AFTER = dict.fromkeys(("p_num_drafts", "p_copies"), "*i32")
STRIDES = {"columns_stride": "i32:16", "kept_stride": "i32"}


def heads_of(rule: int, size: int = 128) -> dict[str, int]:
    """The heads and the kind of a rule, with ``size`` channels of a key."""
    own = {"SCANS": rule in (SCAN, LIGHTNING), "DECAYS": size if rule == BY_CHANNEL else 1}
    return HEADS | own


def num_stack_bytes(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], arch: int, num_warps: int = 4
) -> int:
    names = kernel.arg_names
    floats = {name: "*fp32" for name in FLOATS if name in names}
    found = compile_kernel(kernel, signature | floats, constants, arch, num_warps=num_warps)
    return found.num_stack_bytes


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("rule", "dtype", "most_drafts"), every_pair(RECURRENCES, ["bf16", "fp32"], [0, 3])
)
def test_mix_kernel(most_drafts: int, dtype: str, arch: int, rule: int) -> None:
    signature = dict.fromkeys(("p_x", "p_gates", "p_conv", "p_bias"), f"*{dtype}") | OF_ROWS
    signature |= STRIDES | {"p_token_rows": "*i32", "num_tokens": "i32"}
    signature |= {"least": "fp32", "most": "fp32", "eps": "fp32", "sines": "i32"}
    dims = {"KEY_DIM": 128, "VALUE_DIM": 128, "WIDTH": 4, "BLOCK": 128}
    if rule == LIGHTNING:
        dims |= {"WIDTH": 1}
    terms = {"HAS_BIAS": rule == SCAN, "ROTATED": 64 if rule == LIGHTNING else 0}
    constants = heads_of(rule) | dims | terms | {"MOST_DRAFTS": most_drafts}
    assert num_stack_bytes(mix_kernel, signature, constants, arch, num_warps=2) == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("most_drafts", [0, 3])
def test_note_kernel(most_drafts: int, dtype: str, arch: int) -> None:
    signature = dict.fromkeys(("p_x", "p_gates"), f"*{dtype}") | OF_ROWS | AFTER
    signature |= STRIDES | {"interval": "i32"}
    dims = {"NUM_CHANNELS": NUM_CHANNELS, "NUM_GATES": 64, "NUM_IN_X": 12288, "WIDTH": 4}
    blocks = {"BLOCK_W": 4, "BLOCK_D": 4, "BLOCK": CHANNELS, "MOST_DRAFTS": most_drafts}
    assert num_stack_bytes(note_kernel, signature, dims | blocks, arch) == 0


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("rule", "size"),
    only(
        [*((rule, 128) for rule in RECURRENCES), (GATED, 256), (BY_CHANNEL, 256)],
        *(RECURRENCES, (128, 256)),
    ),
)
def test_advance_kernel(size: int, arch: int, rule: int) -> None:
    signature = OF_ROWS | AFTER | {"num_tokens": "i32", "interval": "i32"}
    dims = {"KEY_DIM": size, "VALUE_DIM": size, "BLOCK_K": size, "BLOCK_V": VALUES}
    signature |= {"matrices_stride": "i32:16"}
    constants = heads_of(rule, size) | dims | {"MOST_DRAFTS": 3, "HAS_SKIP": rule == SCAN}
    assert num_stack_bytes(advance_kernel, signature, constants, arch) == 0


@each_rule
@pytest.mark.parametrize("arch", ARCHS)
def test_solve_kernel(arch: int, rule: int) -> None:
    signature = dict.fromkeys(("p_chunk_rows", "p_chunks", *ROWS[1:]), "*i32")
    dims = {"KEY_DIM": 128, "VALUE_DIM": 128, "BLOCK_K": CHUNK_KEYS, "CHUNK": CHUNK}
    constants = HEADS | dims | {"PRECISION": PRECISION, "SCANS": rule != GATED}
    assert num_stack_bytes(solve_kernel, signature, constants, arch) == 0


@pytest.mark.parametrize("rule", [GATED, SCAN, LIGHTNING])
@pytest.mark.parametrize("arch", ARCHS)
def test_pass_kernel(arch: int, rule: int) -> None:
    signature = OF_ROWS | {"p_copies": "*i32", "first_row": "i32", "interval": "i32"}
    dims = {"KEY_DIM": 128, "VALUE_DIM": 128, "CHUNK": CHUNK}
    dims |= {"BLOCK_K": CHUNK_KEYS, "BLOCK_V": CHUNK_VALUES}
    signature |= {"matrices_stride": "i32:16"}
    constants = HEADS | dims | {"PRECISION": PRECISION, "SCANS": rule != GATED}
    constants |= {"HAS_SKIP": rule == SCAN}
    assert num_stack_bytes(pass_kernel, signature, constants, arch) == 0


@each_recurrence
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_finish_kernel(dtype: str, arch: int, rule: int) -> None:
    signature = dict.fromkeys(("p_x", "p_out"), f"*{dtype}") | OF_ROWS
    signature |= {"p_num_drafts": "*i32", "eps": "fp32", "num_tokens": "i32", "num_rows": "i32"}
    # A scan as of Granite 4 Small, lightning attention as of Ling 2.5.
    sizes = {SCAN: (1, 8192, 8192), LIGHTNING: (8, 1024, 1024)}.get(rule, (32, 128, 128))
    dims = dict(zip(("NUM_NORMS", "SIZE", "BLOCK"), sizes, strict=True))
    dims |= {"OPENS_LAST": rule == LIGHTNING}
    own = {key: each for key, each in heads_of(rule).items() if key not in HEADS}
    constants = {"NUM_CHANNELS": NUM_CHANNELS} | own | dims
    num_warps = 8 if rule in (SCAN, LIGHTNING) else 2
    assert num_stack_bytes(finish_kernel, signature, constants, arch, num_warps) == 0

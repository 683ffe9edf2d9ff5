"""What a kernel and its launch need to begin early, see ``kernels.dependent``."""

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from kernels import switches
from kernels.dependent import waits

MIN_CAPABILITY = 90
LINE_BYTES = tl.constexpr(128)
PREFETCH_LINES = tl.constexpr(8)  # of a row: about what is on its way to a program at a time


def early() -> dict[str, bool]:
    """What a launch is given, for its kernel and for the driver, to begin early where it may."""
    if not switches.DEPENDENT_LAUNCHES or waits() or knobs.runtime.interpret:
        return {"IS_DEPENDENT": False}
    if driver.active.get_current_target().arch < MIN_CAPABILITY:
        return {"IS_DEPENDENT": False}
    return {"IS_DEPENDENT": True, "launch_pdl": True}


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(p_weight, o_row, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """Asks for the beginning of rows [BLOCK_ROWS] of a weight to come to the L2 cache. Nothing is
    read by that: what a launch in front might still write there would be seen."""
    LINE: tl.constexpr = LINE_BYTES * 8 // p_weight.dtype.element_ty.primitive_bitwidth
    o_line = tl.minimum(tl.arange(0, PREFETCH_LINES) * LINE, SIZE - 1)
    p_lines = p_weight + o_row.to(tl.int64)[:, None] * STRIDE + o_line[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [p_lines.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

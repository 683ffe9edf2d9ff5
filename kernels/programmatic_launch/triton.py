"""Programmatic dependent launch in Triton, see ``kernels.programmatic_launch``."""

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from kernels import switches
from kernels.programmatic_launch import waits

MIN_CAPABILITY = 90


def early() -> dict[str, bool]:
    """Launch options, for kernel and driver, that let a launch start early where allowed."""
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

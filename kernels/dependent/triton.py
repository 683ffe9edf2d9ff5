"""What a kernel and its launch need to begin early, see ``kernels.dependent``."""

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import driver

from kernels import switches
from kernels.dependent import waits

MIN_CAPABILITY = 90


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

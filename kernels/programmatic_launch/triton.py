"""Programmatic dependent launch in Triton, see ``kernels.programmatic_launch``."""

from functools import cache

import triton
import triton.language as tl
from triton import knobs
from triton.backends.driver import DriverBase
from triton.runtime import driver

from kernels import switches
from kernels.programmatic_launch import waits

MIN_CAPABILITY = 90
EARLY = {"IS_DEPENDENT": True, "launch_pdl": True}
LATE = {"IS_DEPENDENT": False}


def early() -> dict[str, bool]:
    """Launch options, for kernel and driver, that let a launch start early where allowed."""
    if not switches.DEPENDENT_LAUNCHES or waits() or knobs.runtime.interpret:
        return LATE
    return _of_device(driver.active)


@cache
def _of_device(active: DriverBase) -> dict[str, bool]:
    """All GPUs of a process are of one kind."""
    return EARLY if active.get_current_target().arch >= MIN_CAPABILITY else LATE


@triton.jit
def begin(IS_DEPENDENT: tl.constexpr):
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

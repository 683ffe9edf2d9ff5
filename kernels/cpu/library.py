"""Loads the best compiled library for this CPU."""

import ctypes
import logging
from functools import cache
from pathlib import Path

from kernels.cpu.build import for_this_cpu, library_name

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# Linux on x86-64: AMX's registers are large, and a process must request them.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def variants() -> list[str]:
    """Names of the variants this CPU can run, best first. Requests the use of AMX from the kernel;
    AMX variants are listed if it is granted."""
    return [name for name in for_this_cpu() if name != "amx" or _may_use_tiles()]


def find_variant() -> str | None:
    """The best variant that is built and that this CPU can run."""
    return next((name for name in variants() if (FOLDER / library_name(name)).is_file()), None)


@cache
def load_library(variant: str) -> ctypes.CDLL:
    """Raises OSError if the system cannot load the library."""
    return ctypes.CDLL(str(FOLDER / library_name(variant)))


@cache
def _may_use_tiles() -> bool:
    """Requests AMX from the kernel, for all threads of this process."""
    request: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if request:
        log.warning("the kernel refuses AMX to this process: GEMMs run without it")
    return request == 0

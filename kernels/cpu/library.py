"""Loads the best compiled library for this CPU."""

import ctypes
import logging
from functools import cache
from pathlib import Path

from kernels.cpu.build import library_name

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
CPUINFO = Path("/proc/cpuinfo")
# Best first: the CPU flags each variant needs. The x86-64 levels are those of the ABI.
_V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NARROW = _V4 | {"avx512_bf16", "avx512_vnni"}
NEEDS = {
    "amx": _NARROW | {"amx_tile", "amx_bf16"},
    "avx512bf16": _NARROW,
    "avx512": _V4,
    "avx2": _V3,
}
# Linux on x86-64: AMX's registers are large, and a process must request them.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def variants() -> list[str]:
    """Names of the variants this CPU can run, best first. Requests the use of AMX from the kernel;
    AMX variants are listed if it is granted."""
    flags = _flags()
    found = [name for name, needed in NEEDS.items() if needed <= flags]
    return [name for name in found if name != "amx" or _may_use_tiles()]


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


def _flags() -> set[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())

"""The compiled library that suits this CPU, and its functions."""

import ctypes
import logging
from functools import cache
from pathlib import Path

from kernels.cpu.build import library_name

log = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
CPUINFO = Path("/proc/cpuinfo")
# Best first: the flags that the kernel must list for a CPU. The levels of x86-64 are its ABI's.
_V3 = {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_NARROW = _V4 | {"avx512_bf16", "avx512_vnni"}
NEEDS = {
    "amx": _NARROW | {"amx_tile", "amx_bf16"},
    "avx512bf16": _NARROW,
    "avx512": _V4,
    "avx2": _V3,
}
# Of Linux on x86-64: AMX's registers are large, and a process has to ask for them.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18


def variants() -> list[str]:
    """Names of the builds that this CPU can run, best first. AMX is among them if the kernel lets
    this process use it, which it is asked for here."""
    flags = _flags()
    found = [name for name, needed in NEEDS.items() if needed <= flags]
    return [name for name in found if name != "amx" or _may_use_tiles()]


def find_variant() -> str | None:
    """The best build that is there and that this CPU can run."""
    return next((name for name in variants() if (FOLDER / library_name(name)).is_file()), None)


@cache
def load_library(variant: str) -> ctypes.CDLL:
    """Raises OSError where the system does not let it."""
    return ctypes.CDLL(str(FOLDER / library_name(variant)))


@cache
def _may_use_tiles() -> bool:
    """Asks the kernel, for all threads of this process."""
    request: int = ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA)
    if request:
        log.warning("the kernel does not let this process use AMX's registers: products without")
    return request == 0


def _flags() -> set[str]:
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())

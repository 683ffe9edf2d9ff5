"""How many programs of a kernel a processor has room for, alone and beside those of another."""

import math

from benchmarks.gpu.dry_card import Launch

NUM_REGISTERS, REGISTER_UNIT = 1 << 16, 256  # of a processor; what a warp is given at a time
SHARED_BYTES, RESERVED_BYTES = 228 << 10, 1 << 10  # of a processor; of a program, for the driver
MAX_WARPS, MAX_PROGRAMS = 64, 32  # of a processor
ROOM = (NUM_REGISTERS, SHARED_BYTES, MAX_WARPS, MAX_PROGRAMS)


def residents(launch: Launch) -> int:
    """Programs of ``launch`` that a processor has room for."""
    return max(1, _fitting(launch, ROOM))


def beside(launch: Launch, other: Launch, num_processors: int) -> int:
    """Programs of ``launch`` that a processor has room for while those of ``other`` are there."""
    num = min(residents(other), math.ceil(math.prod(other.grid) / num_processors))
    taken = (num * each for each in _taken(other))
    return _fitting(launch, [all_ - each for all_, each in zip(ROOM, taken, strict=True)])


def _fitting(launch: Launch, room: tuple[int, ...] | list[int]) -> int:
    return min(has // wants for has, wants in zip(room, _taken(launch), strict=True))


def _taken(launch: Launch) -> tuple[int, int, int, int]:
    """By a program: registers, bytes of shared memory, warps, itself."""
    found = launch.model.resources
    of_warp = math.ceil(32 * found.num_registers / REGISTER_UNIT) * REGISTER_UNIT
    return of_warp * launch.num_warps, found.shared_bytes + RESERVED_BYTES, launch.num_warps, 1

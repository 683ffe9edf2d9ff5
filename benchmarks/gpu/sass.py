"""How long a warp takes for compiled code, by the order and the latencies of its instructions.

A warp issues in order, one instruction a clock at most, and waits until what an instruction reads
is there. Instructions are taken as they stand: a loop as often as is said, both sides of a branch.
What is copied ahead (LDGSTS) is there in time: whether memory brings it is not the code's matter.
"""

import re
import subprocess
import tempfile
from collections.abc import Sequence
from itertools import chain, repeat
from typing import NamedTuple

from benchmarks.gpu.dry_card import CUOBJDUMP

# Clocks until a result is there. Arithmetic, shared memory and L2 as in table 3 of
# PMC10448217; the others are estimates, of which none was measured here.
ARITHMETIC, SHARED, L2 = 4, 20, 200
LATENCIES = (
    (("LDGSTS", "LDGDEPBAR", "DEPBAR"), 0),
    (("LDG", "ATOM", "RED"), L2),
    (("LDS", "LDC", "ULDC"), SHARED),
    (("SHFL", "MUFU", "S2R", "S2UR", "REDUX", "VOTE"), SHARED),
    (("HMMA",), 32),
)
BARRIER = 20  # for the other warps
FENCE = 500  # of a program's stores before the whole card
# A product of a warp group runs beside its warps, for so many clocks at least, and is waited for.
GROUP_PRODUCT, GROUP_LATENCY = 16, 30
STEADY = 3  # from so many times on a loop takes equally long each time
LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
REGISTER = re.compile(r"\b(U?[RP])(\d+)\b")
STORES = ("ST", "RED", "BAR", "BRA", "EXIT", "LDGSTS", "DEPBAR", "WARP", "CALL", "RET", "MEMBAR")


class Instruction(NamedTuple):
    """``read`` and ``written`` are registers by name; ``target`` is a branch's."""

    address: int
    name: str
    written: frozenset[str]
    read: frozenset[str]
    target: int | None
    operands: str


class Loop(NamedTuple):
    """Instructions ``first`` … ``last``, without a loop among them."""

    first: int
    last: int


class Timing(NamedTuple):
    """Of a warp that is alone: clocks, instructions, the clocks of a time in each loop, and those
    of what only the last program does besides."""

    clocks: float
    num_instructions: float
    loop_clocks: tuple[float, ...]
    last_clocks: float


def read_code(cubin: bytes) -> list[Instruction]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return parse(text)


def parse(text: str) -> list[Instruction]:
    """What cuobjdump says; behind a jump to itself there is but padding."""
    found = []
    for address, name, operands in LINE.findall(text):
        where = int(address, 16)
        is_branch = name.startswith("BRA")
        target = (
            int(operands.split()[-1].rstrip(","), 16) if is_branch and "0x" in operands else None
        )
        if target == where:
            break
        written, read = _registers(name, operands)
        found.append(Instruction(where, name, written, read, target, operands))
    return found


def _registers(name: str, operands: str) -> tuple[frozenset[str], frozenset[str]]:
    parts = [part.strip() for part in operands.split(",")]
    if name.startswith(STORES):
        return frozenset(), _named(parts, 1)
    num = 1 + (len(parts) > 1 and re.fullmatch(r"U?P[T\d]", parts[0]) is not None)
    num += len(parts) > num and re.fullmatch(r"U?P\d", parts[num]) is not None
    sources = 2 if "HMMA" in name or ".WIDE" in name else 1
    return _named(parts[:num], _width(name)), _named(parts[num:], sources)


def _width(name: str) -> int:
    """Registers of a result."""
    if name.startswith("HMMA") or ".128" in name or name.endswith(".4"):
        return 4
    return 2 if ".64" in name or ".WIDE" in name or name.endswith(".2") else 1


def _named(parts: Sequence[str], width: int) -> frozenset[str]:
    return frozenset(
        f"{kind}{int(number) + offset}"
        for part in parts
        for kind, number in REGISTER.findall(part)
        for offset in range(width if kind == "R" else 1)
    )


def loops(code: Sequence[Instruction]) -> list[Loop]:
    """The innermost ones, in order."""
    places = {each.address: index for index, each in enumerate(code)}
    found = sorted(
        Loop(places[each.target], last)
        for last, each in enumerate(code)
        if each.target is not None and places.get(each.target, last) < last
    )
    return [
        loop
        for loop in found
        if not any(
            loop != each and loop.first <= each.first and each.last <= loop.last for each in found
        )
    ]


class Warp:
    """``now`` is when it issues next."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_instructions = 0.0
        self._ready: dict[str, float] = {}
        self._products_end = 0.0

    def run(self, code: Sequence[Instruction]) -> None:
        for each in code:
            self.now = max([self.now, *(self._ready.get(name, 0.0) for name in each.read)])
            self._issue(each)
            self.now += 1
            self.num_instructions += 1

    def _issue(self, each: Instruction) -> None:
        if each.name.startswith("HGMMA"):
            self._products_end = max(self._products_end, self.now) + GROUP_PRODUCT
        elif each.name.startswith("WARPGROUP.DEPBAR") and each.operands.endswith("0x0"):
            self.now = max(self.now, self._products_end + GROUP_LATENCY)
        elif each.name.startswith("BAR"):
            self.now += BARRIER
        elif each.name.startswith("MEMBAR"):
            self.now += FENCE
        for name in each.written:
            self._ready[name] = self.now + latency(each.name)

    def skip(self, clocks: float, num_instructions: float) -> None:
        """As much has passed as if the last loop had been run some more times."""
        self.now += clocks
        self._products_end += clocks
        self.num_instructions += num_instructions
        self._ready = {name: at + clocks for name, at in self._ready.items()}


def latency(name: str) -> int:
    for starts, clocks in LATENCIES:
        if name.startswith(starts):
            return clocks
    return ARITHMETIC


def timing(
    code: Sequence[Instruction], times: Sequence[float], ends_at: str | None = None
) -> Timing:
    """Where each loop is run so many ``times``, those that are not named once. Most programs end
    with the first instruction that ``ends_at`` begins, if there is such."""
    ends = (i for i, each in enumerate(code) if ends_at and each.name.startswith(ends_at))
    end = next(ends, len(code))
    warp, done = Warp(), 0
    steady: list[float] = []
    for loop, num in zip(loops(code[: end + 1]), chain(times, repeat(1)), strict=False):
        warp.run(code[done : loop.first])
        done = loop.last + 1
        steady.append(_run_loop(warp, code[loop.first : done], num))
    warp.run(code[done : end + 1])
    clocks, num_instructions = warp.now, warp.num_instructions
    warp.run(code[end + 1 :])
    return Timing(clocks, num_instructions, tuple(steady), warp.now - clocks)


def _run_loop(warp: Warp, body: Sequence[Instruction], times: float) -> float:
    """Clocks of a time."""
    last = 0.0
    for _ in range(round(min(times, STEADY))):
        before = warp.now
        warp.run(body)
        last = warp.now - before
    more = max(0.0, times - STEADY)
    warp.skip(more * last, more * len(body))
    return last

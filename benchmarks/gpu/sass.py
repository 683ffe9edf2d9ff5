"""Disassembly of a compiled kernel."""

import re
import subprocess
import tempfile
from functools import lru_cache
from typing import NamedTuple

from benchmarks.gpu.dry_card import CUOBJDUMP

LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


@lru_cache(maxsize=256)
def read_code(cubin: bytes) -> tuple[Instruction, ...]:
    """Instructions in the order of addresses, up to the padding after a jump to itself."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-sass", file.name]
        text = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    found = []
    for address, name, operands in LINE.findall(text):
        where = int(address, 16)
        if name.startswith("BRA") and f"{where:#x}" in operands.split():
            break
        found.append(Instruction(where, name, operands))
    return tuple(found)

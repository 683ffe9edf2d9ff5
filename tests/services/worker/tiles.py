"""Compiles the native code with AMX instructions emulated in C++: ``python -m
tests.services.worker.tiles`` does it before the tests, and needs only Python and a compiler."""

import sys
from pathlib import Path
from unittest.mock import patch

from kernels.cpu import build

FOLDER = Path(__file__).parents[3] / ".cache" / "tiles"
TILES = build.Variant("v3", set(), (), ("SHOAL_TILES",))
FLAGS = [*build.FLAGS, "-O1"]  # takes a third of the time


def compiled() -> Path:
    """The library, compiled once for each state of the sources. Raises BuildError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with patch.object(build, "VARIANTS", {"tiles": TILES}), patch.object(build, "FLAGS", FLAGS):
        (path,) = build.build(FOLDER, sys.exit)
    return path


if __name__ == "__main__":
    print(compiled())

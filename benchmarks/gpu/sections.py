"""The sections of the check: the most valuable figures first."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu import engine_table, floor, kernel_table, mesh_table
from benchmarks.gpu.engine_table import Engines, Point
from benchmarks.gpu.suite import Suite

ROOT = Path(__file__).parent.parent.parent
NUM_LINES_TOLD = 30
Rows = Iterator[dict[str, Any]]


class Section(NamedTuple):
    """``run`` gives rows, within so many seconds where it can; it begins only where ``needs_s``
    are left, and has ``limit_s`` at most."""

    name: str
    needs_s: float
    limit_s: float
    run: Callable[[float], Rows]


class Sections:
    """Later ones use the bandwidth that an earlier one found."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self._suite = suite
        self._engines = Engines(suite, folder)
        self._read_gb_per_s: float | None = None

    def __iter__(self) -> Iterator[Section]:
        if self._suite.device.type == "cuda":
            yield Section("tests", 20, 120, partial(run_tests, marked_files()))
        yield Section("bandwidth, GB/s", 10, 30, self._floor)
        for name, points in engine_table.points(self._suite):
            yield Section(f"engine, {name}", 30, 120, partial(self._engine, points))
        yield Section("mesh", 60, 120, self._mesh)
        yield Section("kernels", 20, 100, self._kernels)
        yield Section("other configurations", 20, 60, self._sweeps)
        yield Section("transformers", 45, 120, self._peers)

    def close(self) -> None:
        self._engines.close()

    def _floor(self, limit_s: float) -> Rows:
        found = floor.measure(self._suite)
        self._read_gb_per_s = found["read"]
        yield found

    def _engine(self, points: list[Point], limit_s: float) -> Rows:
        ends_s = time.monotonic() + limit_s
        for point in points:
            if time.monotonic() > ends_s:
                return
            yield engine_table.measure(self._engines, point, self._read_gb_per_s)

    def _mesh(self, limit_s: float) -> Rows:
        self._engines.close()
        yield from mesh_table.measure(self._suite, self._engines.folder("model"), limit_s)

    def _kernels(self, limit_s: float) -> Rows:
        self._engines.close()
        ends_s = time.monotonic() + limit_s
        yield from kernel_table.rows(self._suite, self._read_gb_per_s, ends_s)

    def _sweeps(self, limit_s: float) -> Rows:
        yield from kernel_table.sweeps(self._suite, time.monotonic() + limit_s)

    def _peers(self, limit_s: float) -> Rows:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would look for kernels there
        from benchmarks.gpu.peers import Peer  # transformers takes seconds, and may be missing

        ends_s = time.monotonic() + limit_s
        peer = Peer(self._suite, self._engines.folder("model"))
        for num_rows in self._suite.mesh_batches:
            if time.monotonic() > ends_s:
                return
            yield peer.measure(num_rows)


def marked_files() -> list[Path]:
    """Those with tests for cards: others may want what is not on a machine that has one."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    return [path for path in files if "pytest.mark.gpu" in path.read_text()]


def run_tests(files: list[Path], limit_s: float) -> Rows:
    """Raises RuntimeError where one fails, and subprocess.TimeoutExpired."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", *map(str, files)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        yield {"output": _last_lines(bytes(error.stdout or b"").decode())}
        raise
    else:
        yield {"exit code": done.returncode, "output": _last_lines(done.stdout + done.stderr)}
        if done.returncode:
            raise RuntimeError(f"pytest ended with {done.returncode}")


def _last_lines(text: str) -> list[str]:
    return text.splitlines()[-NUM_LINES_TOLD:]

"""Services forked from a process that has imported their libraries.

Imports take two of three seconds of a start. Tests of starts or memory, and every ``shoal serve``,
start fleets from the command line instead. Libraries read the parent's environment at import.
"""

import asyncio
import os
import runpy
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from benchmarks.harness.fleet import Fleet, Process, running_fleet
from tests.preloaded import PRELOADED

ROOT = Path(__file__).parent.parent.parent
LOOK_S = 0.01

_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


class ForkedProcess:
    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        while (code := self.returncode) is None:
            await asyncio.sleep(LOOK_S)
        return code

    def send_signal(self, signal: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal)

    def kill(self) -> None:
        self._process.kill()


async def fork(module: str, environment: dict[str, str], log_path: Path) -> Process:
    """A launcher for fleets that forks."""
    process = _context.Process(target=_run, args=(module, environment, log_path), daemon=True)
    process.start()
    return ForkedProcess(process)


@asynccontextmanager
async def one_of_each(directory: Path, **settings: str) -> AsyncIterator[Fleet]:
    """A mesh of one service of each kind; workers have one thread, as other tests need the
    cores."""
    directory.mkdir(exist_ok=True)
    async with running_fleet(directory, {"NUM_THREADS": "1"} | settings, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        yield fleet


def _run(module: str, environment: dict[str, str], log_path: Path) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    with log_path.open("wb") as log:
        os.dup2(log.fileno(), sys.stderr.fileno())
    sys.argv = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)

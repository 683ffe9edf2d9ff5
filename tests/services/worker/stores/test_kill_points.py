"""A kill at each point between the plan of a copy and its answer: at plans, jobs of the disk, and
calls that read or write files, before, within and after them.

A scheduler plans for a simulated worker with the files of a real store and of one on a disk. The
worker asserts that each token reads the KV of its own text.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from services.scheduler.scheduler import Planned
from services.worker.block_layout.memory import BlockMemory, StateMemory
from services.worker.stores import disk as disks
from services.worker.stores.disk import Disk
from services.worker.stores.disk_link import DiskLink, inventory_message
from services.worker.stores.files import inventory_of
from services.worker.stores.opening import Root, Sizes, open_store
from services.worker.stores.part import HostPart, StorePart, is_answered, rows_of
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Attach,
    Capacity,
    Copied,
    Fetch,
    Forget,
    Hello,
    Load,
    Save,
    Spill,
    StepPlan,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.scheduler.stores.storing_worker import StoringWorker
from tests.services.scheduler.stores.test_stores import MODEL, Mesh

CAPACITY = Capacity(16, 4, 2, 16, 64, 1000)
BLOCK_BYTES = CAPACITY.block_size * 8
IN_MEMORY, ON_DISK = 6, 60  # places
CALLS = ("pread", "preadv", "pwrite", "pwritev", "ftruncate", "posix_fallocate", "replace", "link")
MOST_PLANS = 1000
NUM_KILLS = 30
BEFORE, WITHIN, AFTER = range(3)


class Killed(BaseException):
    pass


class Killer:
    """Counts points, and kills at point ``at``: BEFORE, WITHIN or AFTER a call."""

    def __init__(self, at: int | None = None, when: int = BEFORE) -> None:
        self.num, self._at, self._when = 0, at, when

    def point(self) -> None:
        self.call(lambda: None)

    def call(self, whole: Callable[[], Any], half: Callable[[], Any] | None = None) -> Any:
        self.num += 1
        if self.num - 1 != self._at:
            return whole()
        if self._when == AFTER:
            whole()
        elif self._when == WITHIN and half is not None:
            half()
        raise Killed

    def wrap(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            monkeypatch.setattr(os, name, partial(self._wrapped, name, getattr(os, name)))

    def _wrapped(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        half = None
        if name == "pwrite":
            fd, content, offset = arguments
            half = partial(function, fd, content[: len(content) // 2], offset)
        elif name == "pwritev":
            fd, pieces, offset = arguments
            content = b"".join(pieces)
            half = partial(function, fd, [content[: len(content) // 2]], offset)
        return self.call(partial(function, *arguments), half)


class Jobs:
    """The jobs of a disk, which the test runs."""

    def __init__(self, name: str, soon: object, fail: object) -> None:
        self.waiting: list[Any] = []

    def submit(self, job: Any) -> None:
        self.waiting.append(job)


class Copies(StoringWorker):
    """Its blocks are copied by ``part``."""

    part: StorePart
    link: DiskLink
    table: np.ndarray

    def begin(self, part: StorePart, link: DiskLink, table: np.ndarray) -> None:
        self.part, self.link, self.table = part, link, table
        part.on_copied, part.on_spilled = self.answers.append, link.spill

    def copy(self, plan: StepPlan) -> Copied | None:
        rows = rows_of(plan)
        if not rows:
            return None
        for row in rows:
            self.link.check(row)
            if isinstance(row, Save):
                self.table[row.block] = self.kv[row.block]
        self.link.begin(plan.step, rows)
        self.part.apply(plan, [])
        copied = self.answers.pop()
        for row in rows:
            if isinstance(row, Load):
                self.check_load(plan, row.block)
                if row.key not in copied.lost:
                    self.kv[row.block] = self.table[row.block].tolist()
        return copied if is_answered(rows) else None


class Process:
    """A worker of ``mesh``, with its stores in ``folder``."""

    def __init__(self, mesh: Mesh, folder: Path, number: int, killer: Killer) -> None:
        self._mesh, self._killer = mesh, killer
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "worker", f"w{number}", MODEL, CAPACITY)
        self.peer, self.rows = FakePeer(hello), list[Any]()
        self.stores: list[Any] = []
        for name, num in (("memory", IN_MEMORY), ("disk", ON_DISK)):
            root = Root(folder / name, num * (BLOCK_BYTES + 64), "dir", "size")
            sizes = Sizes(BLOCK_BYTES, 0, 0, 0)
            self.stores.append(open_store(root, "layout", sizes, lambda: 1 << 40))
        table = torch.zeros((CAPACITY.num_blocks, CAPACITY.block_size), dtype=torch.int64)
        disk = Disk(self.stores[1])
        states = StateMemory([], np.zeros(0, np.int64), 0)
        part = HostPart(self.stores[0], disk, BlockMemory([table]), states)
        link = DiskLink(disk, lambda: self, asyncio.get_running_loop())  # type: ignore[arg-type,return-value]
        self.threads: list[Any] = disk._threads
        self.simulated = Copies(CAPACITY)
        self.simulated.begin(part, link, table.numpy())
        mesh.service.on_up(self.peer)
        mesh.service.on_message(self.peer, Attach(), [])
        message = inventory_message(part.own.header, part.location)
        self.send(message, *inventory_of(part.own))
        self.hello = hello
        link.greet(self)  # type: ignore[arg-type]

    def send(self, message: Any, *arrays: np.ndarray) -> None:
        self._mesh.service.on_message(self.peer, message, list(arrays))

    def run(self) -> bool:
        """A plan, or a job of the disk; False if there is none."""
        self._mesh.service._plan()
        plans = self.peer.take(StepPlan)
        for plan, (ids, *_) in plans:
            self.rows += plan.rows
            self._killer.point()
            result, arrays = self.simulated.step(Planned(plan, ids))
            for each in self.simulated.answers:
                self.send(each)
            self.simulated.answers.clear()
            self._killer.point()
            self.send(result, *arrays)
        jobs = [(thread, job) for thread in self.threads for job in thread.waiting[:1]]
        for thread, job in jobs:
            done = self._killer.call(job.run)
            thread.waiting.pop(0)
            job.done(done)
        return bool(plans or jobs)

    def die(self) -> None:
        for store in self.stores:
            store.close()
        self._mesh.service.on_down(self.peer, "it is killed")


def steps(mesh: Mesh) -> Iterator[None]:
    """Requests one after the other: three chats in turn, more than the cache has room for, and a
    reset."""
    rng = np.random.default_rng(3)
    chats = [rng.integers(1, 900, 21).astype(np.int32) for _ in range(4)]
    for turn in range(3):
        for number, chat in enumerate(chats):
            mesh.ask(f"t{turn}c{number}", chat, max_tokens=6)
            yield
        if turn == 1:
            mesh.service.commands()["reset_prefix_cache"]()


def play(folder: Path, killer: Killer) -> Sequence[Any]:
    """Returns the rows of all plans. A killed worker is followed by another one."""
    mesh, number, rows = Mesh(folder / "mesh"), 0, list[Any]()
    process: Process | None = None
    num_plans = 0
    work = steps(mesh)
    next(work)
    is_over = False
    while not is_over or mesh.core.sequences:
        num_plans += 1
        assert num_plans < MOST_PLANS, "a sequence is stuck"
        try:
            if process is None:
                number += 1
                process = Process(mesh, folder, number, killer)
            if not process.run() and not mesh.core.sequences:
                is_over = next(work, "over") == "over"
        except Killed:
            if process is not None:
                rows += process.rows
                process.die()
            process = None
    assert process is not None
    while process.run():
        pass
    process.die()
    return [*rows, *process.rows]


@pytest.fixture
def with_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disks, "_DiskThread", Jobs)


async def kill_at(
    points: Sequence[int], folder: Path, times: Sequence[int] = (BEFORE, WITHIN, AFTER)
) -> None:
    for place, at in enumerate(points):
        when = times[place % len(times)]
        killer = Killer(at, when)
        with pytest.MonkeyPatch.context() as patch:
            killer.wrap(patch)
            play(folder / f"{at}-{when}", killer)
        assert killer.num > at


async def count_points(folder: Path) -> int:
    killer = Killer()
    with pytest.MonkeyPatch.context() as patch:
        killer.wrap(patch)
        rows = play(folder / "whole", killer)
    assert {Save, Load, Spill, Fetch, Forget} <= {type(each) for each in rows}
    return killer.num


async def test_kills_at_points_of_copies(tmp_path: Path, with_jobs: None) -> None:
    num = await count_points(tmp_path)
    assert num > 3 * NUM_KILLS
    await kill_at([num * each // NUM_KILLS for each in range(NUM_KILLS)], tmp_path)


@pytest.mark.slow
async def test_kills_at_all_points_of_copies(tmp_path: Path, with_jobs: None) -> None:
    num = await count_points(tmp_path)
    for when in (BEFORE, WITHIN, AFTER):
        await kill_at(range(num), tmp_path, [when])

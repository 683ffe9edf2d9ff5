"""The store on a disk below a worker's store. Its copies run on threads of their own, since a disk
may take longer than a step, or for ever."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

from prometheus_client import Counter, Gauge

from services.worker.stores.files import inventory_of
from services.worker.stores.opening import OpenStore
from services.worker.stores.places import BlockLost, checksum
from shared.wire.messages import Fetch, Fetched, Spilled

log = logging.getLogger(__name__)

STALL_S = 5.0
"""Of one plan's copies, 16 MiB or one place, after which the disk is not used any more. Chosen."""
JOIN_S = 1.0  # of a thread at the end

BYTES = Counter(
    "shoal_kv_store_bytes",
    "Bytes of KV blocks and states saved and loaded, and spilled to and fetched from a disk",
    ["direction"],
)
SECONDS = Counter("shoal_kv_store_seconds", "Seconds spent on these copies", ["direction"])
LOST = Counter(
    "shoal_kv_store_lost",
    "KV blocks and states that could not be loaded: another or none is there (other), damaged"
    " (damaged), or not readable (unreadable)",
    ["reason"],
)
UNSAVED = Counter("shoal_kv_store_unsaved", "KV blocks and states that could not be saved")
UP = Gauge("shoal_kv_store_up", "1 while a worker's store takes KV blocks", ["store"])


@dataclass
class Took:
    s: float = 0.0


@contextmanager
def timed(direction: str) -> Iterator[Took]:
    started_s, took = time.perf_counter(), Took()
    try:
        yield took
    finally:
        took.s = time.perf_counter() - started_s
        SECONDS.labels(direction).inc(took.s)


class Spilling(NamedTuple):
    """The ``content`` of a place with its checksum, on its way to a place on the disk; None if it
    could not be read."""

    key: bytes
    place: int
    content: bytearray | None
    checksum: int


Fail = Callable[[Exception], None]
Contents = list[tuple[bytes, bytearray]]


@dataclass(eq=False)
class _Job:
    """``run`` is called on a thread, and ``done`` with its result on the event loop, or with
    ``given_up`` if the disk stalls."""

    run: Callable[[], Any]
    done: Callable[[Any], None]
    given_up: Any
    begun_s: float | None = None


class _DiskThread:
    """Runs one job after another. It keeps no process alive: the disk may never answer. ``soon``
    calls back on the event loop, and ``fail`` raises an error there."""

    def __init__(self, name: str, soon: Callable[..., None], fail: Fail) -> None:
        self._soon, self._fail = soon, fail
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._open: deque[_Job] = deque()
        self._is_stalled = False
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: _Job) -> None:
        if self._is_stalled:
            job.done(job.given_up)
            return
        self._open.append(job)
        self._queue.put(job)

    def has_stalled(self, now_s: float) -> bool:
        begun_s = self._open[0].begun_s if self._open else None
        return begun_s is not None and now_s - begun_s > STALL_S

    def give_up(self) -> None:
        self._is_stalled = True
        while self._open:
            job = self._open.popleft()
            job.done(job.given_up)

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        for job in iter(self._queue.get, None):
            job.begun_s = time.monotonic()
            try:
                result = job.run()
            except Exception as error:
                self._fail(error)
                return
            self._soon(self._finish, job, result)

    def _finish(self, job: _Job, result: Any) -> None:
        if self._open and self._open[0] is job:
            self._open.popleft()
            job.done(result)


class Disk:
    """Used on the event loop, but for ``take``. It holds the fetched places until they are
    taken."""

    def __init__(self, store: OpenStore) -> None:
        self.header, self.location = store.own.header, store.location
        self._own, self._others = store.own, store.others
        self._up = UP.labels(self.header.id)
        self._up.set(1)
        self._is_down = False
        self._held: dict[bytes, list[bytearray]] = {}
        self._lock = Lock()  # of the held ones, taken on the thread of the steps
        self._threads: list[_DiskThread] = []

    def start(self, soon: Callable[..., None], fail: Fail) -> None:
        self._threads = [_DiskThread(name, soon, fail) for name in ("disk reads", "disk writes")]

    def stop(self) -> None:
        for each in self._threads:
            each.stop()

    def look(self, now_s: float) -> None:
        """Gives up a disk that does not answer: its places are lost."""
        if any(each.has_stalled(now_s) for each in self._threads):
            self._go_down(f"a copy takes longer than {STALL_S:g} s")
            for each in self._threads:
                each.give_up()

    # --- jobs -----------------------------------------------------------------------------------

    def fetch(
        self, step: int, rows: Sequence[Fetch], done: Callable[[tuple[Fetched, Contents]], None]
    ) -> None:
        lost = Fetched(step, [row.key for row in rows])
        self._threads[0].submit(_Job(lambda: self._fetch(step, rows), done, (lost, [])))

    def spill(self, step: int, copies: Sequence[Spilling], done: Callable[[Spilled], None]) -> None:
        failed = Spilled(step, [each.key for each in copies], is_down=True)
        self._threads[1].submit(_Job(lambda: self._spill(step, copies), done, failed))

    def forget(self, places: Sequence[int]) -> None:
        self._threads[1].submit(_Job(lambda: self._forget(places), lambda _: None, None))

    def list_full(self, done: Callable[[Any], None]) -> None:
        """``done`` gets the keys and numbers of the full places after all jobs before, or None."""
        self._threads[1].submit(_Job(lambda: inventory_of(self._own), done, None))

    # --- fetched places -------------------------------------------------------------------------

    def hold(self, contents: Contents) -> None:
        with self._lock:
            for key, content in contents:
                self._held.setdefault(key, []).append(content)

    def take(self, key: bytes) -> bytearray | None:
        with self._lock:
            found = self._held.get(key)
            if not found:
                return None
            content = found.pop()
            if not found:
                del self._held[key]
            return content

    def clear(self) -> None:
        with self._lock:
            self._held.clear()

    # --- on the threads -------------------------------------------------------------------------

    def _fetch(self, step: int, rows: Sequence[Fetch]) -> tuple[Fetched, Contents]:
        lost, contents = [], []
        with timed("fetch") as took:
            for row in rows:
                try:
                    contents.append((row.key, self._read(row)))
                except BlockLost as why:
                    LOST.labels(str(why)).inc()
                    lost.append(row.key)
        BYTES.labels("fetch").inc(sum(len(content) for _, content in contents))
        return Fetched(step, lost, took.s), contents

    def _read(self, row: Fetch) -> bytearray:
        is_own = row.store == self.header.id
        store = self._own if is_own else self._others.find(row.store)
        if store is None:
            raise BlockLost("unreadable")
        found = store.find(row.place)
        content = bytearray(found.places.part.place_bytes)
        found.places.load(found.number, row.key, [memoryview(content)])
        return content

    def _spill(self, step: int, copies: Sequence[Spilling]) -> Spilled:
        if self._own.is_removed:
            self._go_down("its files were removed")
        with timed("spill"):
            unsaved = [each.key for each in copies if not self._write(each)]
        UNSAVED.inc(len(unsaved))
        return Spilled(step, unsaved, self._is_down)

    def _write(self, copy: Spilling) -> bool:
        if self._is_down or copy.content is None:
            return False
        pieces = [memoryview(copy.content)]
        if checksum(pieces) != copy.checksum:
            LOST.labels("damaged").inc()
            return False
        found = self._own.find(copy.place)
        try:
            found.places.save(found.number, copy.key, pieces)
        except OSError as error:
            self._go_down(str(error.strerror))
            return False
        BYTES.labels("spill").inc(len(copy.content))
        return True

    def _forget(self, places: Sequence[int]) -> None:
        try:
            for each in places:
                found = self._own.find(each)
                found.places.forget(found.number)
        except OSError as error:
            self._go_down(str(error.strerror))

    def _go_down(self, why: str) -> None:
        if not self._is_down:
            log.warning("KV store on a disk: takes no more blocks: %s; sequences go on", why)
            self._is_down = True
            self._up.set(0)

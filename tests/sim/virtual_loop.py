"""An event loop in virtual time, on which many processes run as one.

Each callback belongs to the process in whose context it was made. A process runs its callbacks in
order, as its own loop would; between processes chance decides. So a process can be stopped, slowed
or killed between any two of its awaits.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from itertools import count
from random import Random
from typing import Any
from unittest.mock import patch

from shared.process.service import NEVER_RETRIEVED

START_S = 1e6
EPOCH_S = 1.8e9
TURN_S, THREAD_S = 20e-6, 3e-3
MAX_IDLE_TURNS = 100_000
"""Callbacks in one moment, above which somebody waits in a circle."""


class Process:
    """Callbacks that run one after another; none runs before ``free_s``."""

    def __init__(self, name: str, turn_s: float = TURN_S) -> None:
        self.name = name
        self.turn_s = turn_s
        self.thread_s = THREAD_S
        self.clock_s = 0.0  # by which its clocks differ from others'
        self.wall_s = 0.0  # by which its wall clock is wrong
        self.free_s = 0.0
        self.is_dead = False
        self.num_turns = 0
        self.trap: tuple[int, Callable[[], None]] | None = None  # before which turn, what
        self.errors: list[BaseException] = []
        self.ready: deque[asyncio.Handle] = deque()
        self.has_turn = False
        self.tasks: dict[asyncio.Task[Any], None] = {}  # that have not ended
        self.context = Context()
        self.context.run(PROCESS.set, self)


PROCESS: ContextVar[Process] = ContextVar("process")


class VirtualLoop(asyncio.AbstractEventLoop):
    """``random`` is all chance there is."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_s = START_S
        self.world = Process("world", 0.0)
        self.running = self.world
        self._heap: list[tuple[float, float, int, Process | asyncio.TimerHandle]] = []
        self._numbers = count()
        self._num_idle_turns = 0

    # --- time -----------------------------------------------------------------------------------

    def time(self) -> float:
        return self.now_s + self.running.clock_s

    def _wall_s(self) -> float:
        return EPOCH_S + self.now_s - START_S + self.running.wall_s

    @contextmanager
    def entered(self) -> Iterator[None]:
        """All clocks show virtual time, and step threads are ours."""
        with (
            patch.multiple(
                time,
                monotonic=self.time,
                perf_counter=self.time,
                thread_time=lambda: 0.0,
                time=self._wall_s,
                time_ns=lambda: int(1e9 * self._wall_s()),
            ),
            patch("services.worker.step_thread.ThreadPoolExecutor", VirtualThread),
        ):
            outer = asyncio._get_running_loop()  # of a run that checks itself by another
            asyncio._set_running_loop(self)
            try:
                yield
            finally:
                asyncio._set_running_loop(outer)

    # --- callbacks ------------------------------------------------------------------------------

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._add(handle)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._push(when - _process_of(handle).clock_s, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)
        self._push(self.now_s + delay, handle)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when it is due."""

    def _push(self, when_s: float, what: Process | asyncio.TimerHandle) -> None:
        heappush(self._heap, (when_s, self.random.random(), next(self._numbers), what))

    def _add(self, handle: asyncio.Handle) -> None:
        process = _process_of(handle)
        process.ready.append(handle)
        self.give_turn(process)

    def give_turn(self, process: Process) -> None:
        if process.ready and not process.has_turn and not process.is_dead:
            process.has_turn = True
            self._push(max(self.now_s, process.free_s), process)

    def run_until(self, end_s: float) -> None:
        while self._heap and self._heap[0][0] <= end_s:
            self._step()
        self.now_s = end_s

    def _step(self) -> None:
        when_s, _, _, what = heappop(self._heap)
        self._num_idle_turns = 0 if when_s > self.now_s else self._num_idle_turns + 1
        assert self._num_idle_turns < MAX_IDLE_TURNS, f"{self.running.name} waits in a circle"
        self.now_s = max(self.now_s, when_s)
        if isinstance(what, asyncio.TimerHandle):
            if not what.cancelled():
                self._add(what)
            return
        what.has_turn = False
        if not what.is_dead and what.free_s <= self.now_s:
            self._take_turn(what)
        self.give_turn(what)

    def _take_turn(self, process: Process) -> None:
        process.num_turns += 1
        if process.trap is not None and process.num_turns >= process.trap[0]:
            _, spring = process.trap
            process.trap = None
            spring()
            if process.is_dead or process.free_s > self.now_s:
                return
        handle = process.ready.popleft()
        if not handle.cancelled():
            self.running = process
            handle._run()
            self.running = self.world
        process.free_s = max(process.free_s, self.now_s + process.turn_s)

    # --- the rest of a loop ---------------------------------------------------------------------

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self, coro: Any, *, name: str | None = None, context: Context | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, name=name, context=context)
        tasks = (context or copy_context())[PROCESS].tasks
        tasks[task] = None
        task.add_done_callback(lambda task: tasks.pop(task, None))
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """As ``shared.process.service`` does: an error that left a callback ends the process."""
        if not context["message"].endswith(NEVER_RETRIEVED):
            error = context.get("exception") or RuntimeError(context["message"])
            self.running.errors.append(error)

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        thread = executor if isinstance(executor, VirtualThread) else VirtualThread()
        return asyncio.wrap_future(thread.submit(func, *args), loop=self)

    async def getaddrinfo(self, host: Any, port: Any, **_: Any) -> list[Any]:
        return [(0, 0, 0, "", (address, port)) for address in self.look_up(host)]

    look_up: Callable[[str], list[str]]

    async def create_server(self, *_: Any, **__: Any) -> Any:
        return _Server()

    create_unix_server = create_server


class VirtualThread:
    """An executor of one thread: each call takes its time, and ends in the order of calls."""

    def __init__(self, *_: Any) -> None:
        self._free_s = 0.0

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        duration_s = loop.running.thread_s * loop.random.uniform(0.2, 1.8)
        self._free_s = max(self._free_s, loop.now_s) + duration_s
        future: Future[Any] = Future()
        loop.call_later(self._free_s - loop.now_s, _settle, future, call, args)
        return future

    def shutdown(self, **_: Any) -> None: ...


class _Server:
    sockets: tuple[()] = ()

    def close(self) -> None: ...

    async def wait_closed(self) -> None: ...


def _process_of(handle: asyncio.Handle) -> Process:
    process: Process = handle._context[PROCESS]  # type: ignore[attr-defined]
    return process


def _settle(future: Future[Any], call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if future.cancelled():
        return
    try:
        result = call(*args)
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(result)

"""Runs one service as a process: settings, log, signals, admin port, drain, exit code.

Exit codes: 0 after a drain, 1 after an error, 2 for a wrong setting.
"""

import asyncio
import ctypes
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import uvloop

from shared.errors import ConfigError, LostError
from shared.link.address import make_private_directory
from shared.link.peer import Handler
from shared.process import log as logs
from shared.process.admin import AdminServer
from shared.process.report import is_fit
from shared.settings.base import Settings
from shared.settings.environment import SUPERVISOR_FD
from shared.settings.load import load_settings
from shared.wire.messages import ServiceName

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
LOOK_S = 0.02
NEVER_RETRIEVED = "exception was never retrieved"  # asyncio's words, for tasks and futures
SWITCH_S = 0.0005  # the event loop waits this long for a busy thread; Python's default is 5 ms

Config = TypeVar("Config", bound=Settings)


class Service(Handler, Protocol):
    async def run(self) -> None:
        """Serves until cancelled. An error ends the process with code 1."""

    async def drain(self) -> None:
        """Refuses new work; returns when open work has ended."""


def main(name: ServiceName, config_class: type[Config], build: Callable[[Config], Service]) -> None:
    """Runs ``build(config)`` until a signal; never returns."""
    try:
        config = load_settings(config_class, sys.argv[1:], f"shoal {name}")
        make_private_directory(config.mesh_dir)
    except ConfigError as error:
        sys.exit(_refuse(name, error))
    logs.set_up(name, config)
    log.debug("starting with %s", config.describe())
    on_ready = _watch_supervisor()
    _raise_file_limit()
    sys.setswitchinterval(SWITCH_S)
    code = uvloop.run(_run(name, config, build, on_ready))
    logging.shutdown()
    os._exit(code)  # a thread that hangs in native code must not keep the process alive


async def _run(
    name: ServiceName,
    config: Config,
    build: Callable[[Config], Service],
    on_ready: Callable[[], None],
) -> int:
    code = 0
    try:
        await _serve(build(config), name, config, on_ready)
    except* ConfigError as errors:
        code = _refuse(name, _first_leaf(errors))
    except* LostError as errors:
        log.error("%s", _first_leaf(errors))
        code = 1
    except* Exception:
        log.exception("the service is broken")
        code = 1
    return code


async def _serve(
    service: Service, name: ServiceName, config: Settings, on_ready: Callable[[], None]
) -> None:
    """Serves until SIGTERM or SIGINT, then drains; raises the error of a broken service."""
    async with AdminServer(service, name, config) as admin, asyncio.TaskGroup() as tasks:
        running = tasks.create_task(service.run())
        stop = tasks.create_task(_stop_signal())
        broken = tasks.create_task(_broken_callback())
        signalling = tasks.create_task(_signal_ready(service, admin, on_ready))
        await asyncio.wait([running, stop, broken], return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            await _drain(service, config.drain_timeout_s)
        for task in (running, stop, broken, signalling):
            task.cancel()


async def _drain(service: Service, timeout_s: float) -> None:
    log.info("draining")
    try:
        async with asyncio.timeout(timeout_s):
            await service.drain()
    except TimeoutError:
        num_open = service.status().load
        log.warning("drain-timeout-s = %g is over: %d open requests end now", timeout_s, num_open)


async def _signal_ready(service: Service, admin: AdminServer, on_ready: Callable[[], None]) -> None:
    """Calls ``on_ready`` once, when the service is ready for the first time.

    Existing objects are permanent by then, so the garbage collector skips them: otherwise each full
    collection would stop a gateway for 50 ms.
    """
    is_ready = False
    while not is_ready:
        await asyncio.sleep(LOOK_S)
        is_ready = is_fit(service)
    gc.collect()
    gc.freeze()
    on_ready()
    admin.has_started = True
    log.info("ready")


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


async def _broken_callback() -> None:
    """Raises the first unhandled error of a callback, for example of a link's reader.

    Two errors are only logged: one of a task without a reader of its result, since only the task's
    own work failed, and a lack of memory in a transport, which the loop then closes.
    """
    loop = asyncio.get_running_loop()
    failure: asyncio.Future[None] = loop.create_future()

    def on_error(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception") or RuntimeError(context["message"])
        is_closed = isinstance(error, MemoryError) and "transport" in context
        if is_closed or context["message"].endswith(NEVER_RETRIEVED):
            log.error("%s", context["message"], exc_info=error)
        elif not failure.done():
            failure.set_exception(error)

    loop.set_exception_handler(on_error)
    await failure


def _first_leaf(error: BaseException) -> BaseException:
    """The first error inside nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _refuse(name: str, error: BaseException) -> int:
    logs.write_error(f"shoal {name}: {error}")
    return 2


def _raise_file_limit() -> None:
    """Every connection takes a descriptor, and the usual soft limit is low."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # a kernel may allow less than the hard limit
        log.warning("the limit of open files stays as it is: %s", error)


def _watch_supervisor() -> Callable[[], None]:
    """Exits soon after the supervisor has ended: its end of a socket pair closes, or the kernel
    sends a signal. Returns a function that reports readiness to the supervisor."""
    text = os.environ.pop(SUPERVISOR_FD, None)
    if text is None:
        return lambda: None
    descriptor = int(text)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_exit_at_end_of, args=(descriptor,), daemon=True).start()

    def signal_ready() -> None:
        with suppress(OSError):  # the supervisor has just ended
            os.write(descriptor, b"r")

    return signal_ready


def _exit_at_end_of(descriptor: int) -> None:
    os.read(descriptor, 1)
    os._exit(1)

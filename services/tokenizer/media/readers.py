"""The processes that read images and videos."""

import asyncio
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from services.tokenizer.media.metrics import READER_DEATHS
from services.tokenizer.media.reader_messages import (
    NO_VIEW,
    Answer,
    File,
    Targets,
    put,
    take,
)
from shared.child_process.child import LENGTH, frame
from shared.errors import RETRY_AFTER_S, Unavailable
from shared.media.family import WITH_ARTICLE
from shared.process.fair_slots import FairSlots
from shared.wire.codec import Array
from shared.wire.messages import MediumKind

log = logging.getLogger(__name__)

MAX_CPU_S: dict[MediumKind, float] = {"image": 10.0, "video": 30.0}
"""Of a processor, for a file. Chosen."""
MAX_READ_S = 60.0  # of a child that may have no processor
MAX_START_S = 60.0
GRACE_S = 1.0

BROKEN = asyncio.IncompleteReadError, EOFError, ConnectionError, msgspec.MsgspecError

ChooseTargets = Callable[[Answer], Targets | None]


class Unreadable(Exception):
    """A file that gives no pixels; the text says why."""


class _Silent(Exception):
    """A child ended before its first answer about a file."""


class _Wanted(NamedTuple):
    kind: MediumKind
    file: Array
    choose: ChooseTargets


class Pixels(NamedTuple):
    """``data`` [frames · height · width · 3] uint8; a view may follow."""

    width: int
    height: int
    data: Array
    is_turned: bool = False


class _Memory:
    """A file in memory. It is open while anything refers to it: calls on threads go on after their
    callers are cancelled, and the next file would get the number of a closed one."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("media")

    def __del__(self) -> None:
        os.close(self.fd)

    def put(self, data: memoryview) -> None:
        put(self.fd, data)

    def take(self, data: memoryview) -> None:
        take(self.fd, data)


class _Child(NamedTuple):
    """Both have the ``memory``."""

    process: Process
    memory: _Memory


class Readers:
    """At most ``num`` children, shared fairly between API keys; they start when they are needed and
    stay. ``close`` ends them."""

    def __init__(self, num: int, max_image_pixels: int) -> None:
        self._max_image_pixels = max_image_pixels
        self._slots = FairSlots(num)
        self._idle: list[_Child] = []
        self._readings: set[asyncio.Task[Pixels | None]] = set()

    async def read(
        self, file: Array, owner: str, choose: ChooseTargets, kind: MediumKind = "image"
    ) -> Pixels | None:
        """``choose`` gets the size of an image or a video before it is decoded, and may raise an
        error; it returns None if no pixels are wanted. A cancelled caller leaves the queue; a
        reading that has begun ends by itself.

        Raises Unreadable, and Unavailable if no child starts.
        """
        await self._slots.take(owner)
        reading = asyncio.create_task(self._read(_Wanted(kind, file, choose)))
        self._readings.add(reading)
        reading.add_done_callback(lambda _: self._end(owner, reading))
        return await asyncio.shield(reading)

    async def close(self) -> None:
        for reading in self._readings:
            reading.cancel()
        if self._readings:
            await asyncio.wait(self._readings)
        for child in self._idle:
            await _end(child)
        self._idle.clear()

    def _end(self, owner: str, reading: asyncio.Task[Pixels | None]) -> None:
        self._readings.discard(reading)
        self._slots.give_back(owner)
        if not reading.cancelled():
            reading.exception()  # marks it as seen: a caller that was cancelled does not read it

    async def _read(self, wanted: _Wanted) -> Pixels | None:
        idle = await self._take_idle()
        if idle is not None:
            try:
                return await self._read_by(idle, wanted)
            except _Silent:
                log.warning("a process that reads images had died, or died at once")
        child = await self._start()
        try:
            return await self._read_by(child, wanted)
        except _Silent:
            raise _dead(wanted, child) from None

    async def _take_idle(self) -> _Child | None:
        while self._idle:
            child = self._idle.pop()
            if child.process.returncode is None:
                return child
            await _kill(child)
        return None

    async def _read_by(self, child: _Child, wanted: _Wanted) -> Pixels | None:
        is_alive = False
        try:
            await asyncio.to_thread(child.memory.put, wanted.file.data)
            async with asyncio.timeout(MAX_READ_S):
                made = await _ask_for_pixels(child, wanted)
            pixels = await _pixels(child, made) if isinstance(made, Answer) else made
            is_alive = True
        except TimeoutError:
            raise _dead(wanted, None) from None
        except BROKEN:
            await _end(child)
            raise _dead(wanted, child) from None
        finally:
            if is_alive:
                self._idle.append(child)
            else:
                await _end(child)
        if isinstance(pixels, Exception):
            raise pixels
        return pixels

    async def _start(self) -> _Child:
        memory = _Memory()
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "services.tokenizer.media.reader"),
                *(str(memory.fd), str(self._max_image_pixels)),
                stdin=PIPE,
                stdout=PIPE,
                pass_fds=(memory.fd,),
            )
        except OSError as error:
            raise _no_child(error) from None
        child = _Child(process, memory)
        try:
            async with asyncio.timeout(MAX_START_S):
                await _answer(child)
        except (TimeoutError, asyncio.IncompleteReadError) as error:
            await _kill(child)
            raise _no_child(error) from None
        except BaseException:
            await _kill(child)
            raise
        return child


async def _ask_for_pixels(child: _Child, wanted: _Wanted) -> Answer | Exception | None:
    """Returns the size of the pixels in memory. An exception is of the file, and the child goes
    on."""
    kind, file, choose = wanted
    try:
        size = await _ask(child, File(file.nbytes, kind, MAX_CPU_S[kind]))
    except BROKEN:
        raise _Silent from None
    if size.error:
        return Unreadable(size.error)
    try:
        targets: Targets | Exception | None = choose(size)
    except Exception as error:
        targets = error
    if not isinstance(targets, Targets):
        await _ask(child, None)
        return targets
    made = await _ask(child, targets)
    if made.error:
        return Unreadable(made.error)
    sizes = made.width, made.height, made.num_frames
    if sizes not in targets.made or made.view not in (targets.views or [NO_VIEW]):
        raise EOFError
    return made


async def _pixels(child: _Child, made: Answer) -> Pixels:
    data = np.empty(made.num_bytes, np.uint8)
    await asyncio.to_thread(child.memory.take, data.data)
    return Pixels(made.width, made.height, data, made.is_turned)


async def _ask(child: _Child, message: msgspec.Struct | None) -> Answer:
    """Raises IncompleteReadError or ConnectionError when the child dies."""
    assert child.process.stdin is not None
    child.process.stdin.write(frame(message))
    await child.process.stdin.drain()
    return await _answer(child)


async def _answer(child: _Child) -> Answer:
    stdout = child.process.stdout
    assert stdout is not None
    (num_bytes,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await stdout.readexactly(num_bytes), type=Answer)


async def _end(child: _Child) -> None:
    """Ends a child that is idle, dying or stuck.

    It ends by itself when its pipe does. ``Process.kill`` polls, and a child that has just died
    would then lose its exit code to asyncio.
    """
    assert child.process.stdin is not None
    child.process.stdin.close()
    try:
        async with asyncio.timeout(GRACE_S):
            await child.process.wait()
    except TimeoutError:
        pass
    await _kill(child)


async def _kill(child: _Child) -> None:
    if child.process.returncode is None:
        child.process.kill()
    await child.process.wait()


def _dead(wanted: _Wanted, child: _Child | None) -> Unreadable:
    """None: it took too long by the clock."""
    READER_DEATHS.inc()
    log.warning("a file of %d bytes ended the process that read it", wanted.file.nbytes)
    text = f"is {WITH_ARTICLE[wanted.kind]} that cannot be decoded"
    if child is None or child.process.returncode == -signal.SIGPROF:
        text += f" in {MAX_CPU_S[wanted.kind]:g} s"
    return Unreadable(text)


def _no_child(error: BaseException) -> Unavailable:
    log.error("no process can read images and videos: %r", error)
    return Unavailable("images and videos cannot be read now", retry_after_s=RETRY_AFTER_S)

"""What does a message cost, from a worker's arrays to the scheduler's, by its size?

StepResults of several sizes through the real link and codec over ipc, between two processes,
against a System V message queue: at the kernel's default limits, where what is larger must be cut
into pieces, and at raised limits. The queue carries ready-made bytes, the link encodes and decodes.
Rounds of all of them alternate.
"""

import argparse
import asyncio
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report import spread, write
from benchmarks.sysv import Queue, max_message_bytes, raised_limits
from shared.codec import Array
from shared.link import Link
from shared.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Message,
    ResultRow,
    State,
    StepPlan,
    StepResult,
)
from shared.peer import Peer
from shared.token_arrays import Layout, TokenArrays

SIZES = (200, 133_136, 802_840, 8 << 20)
WINDOW = 16
ROUND_S = 0.7
NO_IDS = np.zeros(0, np.int32)

Figures = dict[str, float]


def step_result(num_bytes: int) -> tuple[StepResult, TokenArrays]:
    """A step of up to 32 rows whose arrays have ``num_bytes``."""
    num_rows = 32 if num_bytes > 32 * 64 else 1
    num_values = num_bytes // (4 * num_rows) - 2
    rows = [
        ResultRow(slot, f"{slot:032x}/0/0", 1, 1, None, None, num_values)
        for slot in range(num_rows)
    ]
    ids = np.arange(num_rows, dtype=np.int32)
    values = np.zeros(num_rows * num_values, np.float32)
    return StepResult(1, rows), TokenArrays(ids, values, NO_IDS, ids)


class End:
    """One end of the link: counts what comes."""

    def __init__(self, service: str, instance: str) -> None:
        self.num_received = 0
        self.peer: asyncio.Future[Peer] = asyncio.get_running_loop().create_future()
        self.arrived = asyncio.Event()
        self.link = Link(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, service, instance), self)

    def status(self) -> Heartbeat:
        return Heartbeat(State.READY, "", 0, 0)

    def refusal(self, hello: Hello) -> str | None:
        return None

    def on_up(self, peer: Peer) -> None:
        self.peer.set_result(peer)

    def on_down(self, peer: Peer, reason: str) -> None: ...

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        self.num_received += 1
        if isinstance(message, StepResult):
            Layout(message.rows, TokenArrays(*arrays))
            peer.send(StepPlan(self.num_received, [], [], [], [], []), NO_IDS)
        self.arrived.set()


async def receive(directory: Path) -> None:
    """The scheduler's end, a process of its own; prints its CPU seconds when asked by a line."""
    end = End("scheduler", "receiver")
    end.link.listen(directory, "worker", role="workers")
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: (sys.stdin.readline(), _tell_cpu()))
    await end.link.run()


def receive_queue(identifier: int, num_bytes: int) -> None:
    """Takes messages until an empty one; then prints CPU seconds."""
    queue, buffer = Queue(identifier), ctypes.create_string_buffer(num_bytes + 8)
    while queue.receive_into(buffer):
        pass
    _tell_cpu()


def _tell_cpu() -> None:
    print(_cpu_s(), flush=True)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class LinkRun:
    """The worker's end, and the process of the other."""

    async def __aenter__(self) -> "LinkRun":
        self._directory = tempfile.TemporaryDirectory()
        os.chmod(self._directory.name, 0o700)
        self._process = _start("--receive", self._directory.name)
        self._end = End("worker", "sender")
        self._end.link.dial("scheduler", Path(self._directory.name), role="workers")
        self._running = asyncio.create_task(self._end.link.run())
        await self._end.peer
        return self

    async def __aexit__(self, *_: object) -> None:
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self._end.link.close("measured")
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()

    async def measure(self, num_bytes: int) -> Figures:
        """At most ``WINDOW`` messages are unread."""
        end, peer = self._end, await self._end.peer
        result, arrays = step_result(num_bytes)
        num_sent = num_before = end.num_received
        cpu_s, other_cpu_s = _cpu_s(), self._other_cpu_s()
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < ROUND_S:
            while num_sent - end.num_received < WINDOW:
                peer.send(result, *arrays)
                num_sent += 1
            end.arrived.clear()
            await end.arrived.wait()
        while end.num_received < num_sent:
            end.arrived.clear()
            await end.arrived.wait()
        seconds = time.perf_counter() - started_s
        return figures(
            num_sent - num_before,
            num_bytes,
            seconds,
            _cpu_s() - cpu_s,
            self._other_cpu_s() - other_cpu_s,
        )

    def _other_cpu_s(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def measure_queue(num_bytes: int) -> Figures:
    """Payloads above the limit are cut into pieces, as many as they need."""
    piece = min(max_message_bytes(), num_bytes)
    queue, payload = Queue(), bytes(piece)
    num_pieces = -(-num_bytes // piece)
    process = _start("--receive-queue", str(queue.identifier), str(piece))
    try:
        cpu_s, num_sent, started_s = _cpu_s(), 0, time.perf_counter()
        while time.perf_counter() - started_s < ROUND_S:
            for _ in range(num_pieces):
                queue.send(payload)
            num_sent += 1
        queue.send(b"")
        assert process.stdout is not None
        other_cpu_s = float(process.stdout.readline())
        seconds = time.perf_counter() - started_s
        return figures(num_sent, num_bytes, seconds, _cpu_s() - cpu_s, other_cpu_s)
    finally:
        process.kill()
        process.wait()
        queue.remove()


def figures(num: int, num_bytes: int, seconds: float, cpu_s: float, other_cpu_s: float) -> Figures:
    return {
        "messages/s": num / seconds,
        "MB/s": num * num_bytes / seconds / 1e6,
        "sender CPU us/message": cpu_s / num * 1e6,
        "receiver CPU us/message": other_cpu_s / num * 1e6,
    }


def what_the_queue_says(num_bytes: int) -> str:
    """Of one message of this size at the limits that are set."""
    queue = Queue()
    try:
        queue.send(bytes(num_bytes))
    except OSError as error:
        return f"msgsnd fails: {error.strerror}"
    else:
        return "sent"
    finally:
        queue.remove()


def _start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.link", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )


async def measure(num_rounds: int) -> dict[str, Any]:
    results: dict[str, Any] = {"msgmax by default": max_message_bytes()}
    async with LinkRun() as link:
        for num_bytes in SIZES:
            runs: dict[str, list[Figures]] = defaultdict(list)
            for _ in range(num_rounds):
                runs["link"].append(await link.measure(num_bytes))
                runs["queue, pieces of msgmax"].append(await in_thread(measure_queue, num_bytes))
                with raised_limits() as is_raised:
                    if is_raised:
                        runs["queue, limits raised"].append(
                            await in_thread(measure_queue, num_bytes)
                        )
            results[f"{num_bytes} bytes"] = {
                "queue by default": what_the_queue_says(num_bytes),
                **{name: medians(rounds) for name, rounds in runs.items()},
            }
    return results


async def in_thread(work: Callable[[int], Figures], argument: int) -> Figures:
    """The link's heartbeats go on meanwhile."""
    return await asyncio.to_thread(work, argument)


def medians(rounds: list[Figures]) -> dict[str, Any]:
    return {name: spread([each[name] for each in rounds]) for name in rounds[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receive", type=Path)
    parser.add_argument("--receive-queue", type=int, nargs=2)
    chosen = parser.parse_args()
    if chosen.receive:
        asyncio.run(receive(chosen.receive))
    elif chosen.receive_queue:
        receive_queue(*chosen.receive_queue)
    else:
        write("link", asyncio.run(measure(chosen.rounds)))

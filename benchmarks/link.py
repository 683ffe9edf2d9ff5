"""Cost of a message from a worker's arrays to the scheduler's, by size.

Sends StepResults of several sizes through the real link and codec over ipc, between two processes,
and through a System V message queue: at the kernel's default limits, where larger messages are
split, and at raised limits. The queue carries ready-made bytes; the link encodes and decodes.
Rounds of all alternate.
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import sysv
from benchmarks.cost import Figures, cpu_s, figures, forget_peak, peak_bytes, tell_cpu
from benchmarks.report import spread, write
from benchmarks.steps import Step, step_of
from shared.link.link import Link
from shared.link.peer import Peer
from shared.wire.codec import Array
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Message,
    ServiceName,
    State,
    StepPlan,
    StepResult,
)
from shared.wire.token_arrays import Layout, TokenArrays

SIZES = (200, 133_136, 802_840, 8 << 20)
WINDOW = 16
ROUND_S = 0.5
NO_IDS = np.zeros(0, np.int32)


class End:
    """One end of the link, which counts messages."""

    def __init__(self, service: ServiceName, instance: str) -> None:
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

    async def until(self, num: int) -> None:
        """Waits until ``num`` messages have arrived in all."""
        while self.num_received < num:
            self.arrived.clear()
            await self.arrived.wait()


async def receive(directory: Path) -> None:
    """The scheduler's end, in its own process; prints its CPU seconds for each line on stdin."""
    end = End("scheduler", "receiver")
    end.link.listen(directory, "worker", role="workers")
    asyncio.get_running_loop().add_reader(sys.stdin, answer)
    await end.link.run()


def start_receiver(directory: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.link", "--receive", directory],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )


def answer() -> None:
    sys.stdin.readline()
    tell_cpu()


class LinkRun:
    """The worker's end, and the process of the other."""

    async def __aenter__(self) -> "LinkRun":
        self._directory = tempfile.TemporaryDirectory()
        os.chmod(self._directory.name, 0o700)
        self._process = start_receiver(self._directory.name)
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

    async def measure(self, step: Step) -> Figures:
        """At most ``WINDOW`` messages are unread."""
        end, peer = self._end, await self._end.peer
        num_sent = num_before = end.num_received
        before_s, other_before_s = cpu_s(), self._other_cpu_s()
        started_s = time.perf_counter()
        while time.perf_counter() - started_s < ROUND_S:
            while num_sent - end.num_received < WINDOW:
                peer.send(step.result, *step.arrays)
                num_sent += 1
            await end.until(num_sent - WINDOW + 1)
        await end.until(num_sent)
        seconds = time.perf_counter() - started_s
        return figures(
            num_sent - num_before,
            step.arrays.num_bytes,
            seconds,
            cpu_s() - before_s,
            self._other_cpu_s() - other_before_s,
        )

    async def growth_bytes(self, step: Step, num: int) -> int:
        """Growth of the receiver's memory over ``num`` messages, one by one."""
        end, peer = self._end, await self._end.peer
        forget_peak(self._process.pid)
        before = peak_bytes(self._process.pid)
        for _ in range(num):
            peer.send(step.result, *step.arrays)
            await end.until(end.num_received + 1)
        return peak_bytes(self._process.pid) - before

    def _other_cpu_s(self) -> float:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


async def measure(num_rounds: int) -> dict[str, Any]:
    async with LinkRun() as link:
        results = {
            f"{num_bytes} bytes": await compare(link, num_bytes, num_rounds) for num_bytes in SIZES
        }
    return {"msgmax by default": sysv.max_message_bytes(), **results}


async def compare(link: LinkRun, num_bytes: int, num_rounds: int) -> dict[str, Any]:
    runs: dict[str, list[Figures]] = defaultdict(list)
    step = step_of(num_bytes)
    for _ in range(num_rounds):
        runs["link"].append(await link.measure(step))
        runs["queue, pieces of msgmax"].append(await queue(num_bytes))
        with sysv.raised_limits() as is_raised:
            if is_raised:
                runs["queue, limits raised"].append(await queue(num_bytes))
    summary: dict[str, Any] = {name: medians(rounds) for name, rounds in runs.items()}
    rates = {name: each["messages/s"]["median"] for name, each in summary.items()}
    ratios = {f"link / {name}": round(rates["link"] / rates[name], 3) for name in rates}
    ratios.pop("link / link")
    summary["messages/s"] = ratios
    return {"queue by default": await asyncio.to_thread(sysv.verdict, num_bytes), **summary}


async def queue(num_bytes: int) -> Figures:
    """Runs in a thread, so that the link's heartbeats continue."""
    return await asyncio.to_thread(sysv.measure, num_bytes, ROUND_S)


def medians(rounds: list[Figures]) -> dict[str, Any]:
    return {name: spread([each[name] for each in rounds]) for name in rounds[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--receive", type=Path)
    chosen = parser.parse_args()
    if chosen.receive:
        asyncio.run(receive(chosen.receive))
    else:
        write("link", asyncio.run(measure(chosen.rounds)))

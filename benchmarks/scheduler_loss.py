"""Pauses of streams when a scheduler is killed, on one machine and in the stack.

Twelve clients stream continuously from ``shoal serve``, or with ``--stack`` from the stack of
docker-compose.yml; each in its default configuration and with one scheduler. In each round the
busiest scheduler is killed (SIGKILL), followed by an undisturbed watch of the same length. A pause
is the time between two tokens of a stream, a wait the time from a request to its first token.
Outputs are compared with those of undisturbed streams; in the model's own dtype a recomputed token
may round differently. Clients and services share the machine.
"""

import argparse
import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import servers
from benchmarks.harness.checked_load import Load
from benchmarks.harness.docker_engine import provide_base_images, running_engine
from benchmarks.harness.stack import Stack, running_stack
from benchmarks.report import write
from benchmarks.upgrade import Watch, figures

NUM_STREAMS = 12
NUM_TOKENS = 480
WATCH_S = 6.0  # the scheduler is back and the waiting queue empty within it
SETTLE_S = 2.0


@dataclass(frozen=True)
class Target:
    """A mesh at ``url``. ``find`` returns a function that kills the busiest scheduler; the search
    itself takes CPU time too."""

    url: str
    find: Callable[[], Awaitable[Callable[[], None]]]


@asynccontextmanager
async def served(num_schedulers: int) -> AsyncIterator[Target]:
    """A mesh of ``shoal serve``."""
    with tempfile.TemporaryDirectory(prefix="shoal-loss-") as folder:
        server = servers.checkout("--mesh-dir", folder, "--schedulers", str(num_schedulers))
        async with servers.running(server) as url:
            yield Target(url, lambda: _find_child(Path(folder)))


async def _find_child(folder: Path) -> Callable[[], None]:
    found = []
    for path in folder.glob("*/admin.scheduler-*.sock"):
        connector = aiohttp.UnixConnector(str(path))
        with suppress(aiohttp.ClientError):  # killed schedulers do not answer
            async with aiohttp.ClientSession("http://admin", connector=connector) as session:
                found.append(await (await session.get("/status")).json())
    pid = max(found, key=lambda each: each["load"])["pid"]
    return lambda: os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def in_stack(environment: dict[str, str]) -> AsyncIterator[Target]:
    async with running_stack(environment, files=["docker-compose.yml"]) as stack:
        yield Target(stack.url, lambda: _find_container(stack))


async def _find_container(stack: Stack) -> Callable[[], None]:
    schedulers = await stack.containers("scheduler")
    loads = {each: (await stack.status(each))["load"] for each in schedulers}
    pid = await stack.pid(max(loads, key=loads.__getitem__))
    return lambda: os.kill(pid, signal.SIGKILL)


async def measure(target: Target, num_rounds: int) -> dict[str, Any]:
    load = Load(NUM_STREAMS, NUM_TOKENS, lambda _: target.url)
    await load.learn()
    running = asyncio.create_task(load.run())
    watches: dict[str, list[Watch]] = {"killed": [], "undisturbed": []}
    try:
        for _ in range(num_rounds):
            kill = await target.find()
            await asyncio.sleep(SETTLE_S)
            with Watch(load) as killed:
                kill()
                await asyncio.sleep(WATCH_S)
            await asyncio.sleep(SETTLE_S)
            with Watch(load) as undisturbed:
                await asyncio.sleep(WATCH_S)
            watches["killed"].append(killed)
            watches["undisturbed"].append(undisturbed)
    finally:
        load.is_over = True
        await running
    return {
        "streams": NUM_STREAMS,
        "tokens of a stream": NUM_TOKENS,
        **{name: figures(each) for name, each in watches.items()},
    }


async def measure_served(num_rounds: int, num_schedulers: int) -> dict[str, Any]:
    async with served(num_schedulers) as target:
        return await measure(target, num_rounds)


async def measure_stack(num_rounds: int, environment: dict[str, str]) -> dict[str, Any]:
    async with in_stack(environment) as target:
        return await measure(target, num_rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--stack", action="store_true", help="the stack too")
    options = parser.parse_args()
    num = options.rounds
    results = {
        "serve, 1 scheduler": asyncio.run(measure_served(num, 1)),
        "serve": asyncio.run(measure_served(num, 2)),
    }
    if options.stack:
        with running_engine() as environment:
            provide_base_images(environment)
            lone = environment | {"SCHEDULERS": "1"}
            results["stack, 1 scheduler"] = asyncio.run(measure_stack(num, lone))
            results["stack"] = asyncio.run(measure_stack(num, environment))
    write("scheduler_loss", results)


if __name__ == "__main__":
    main()

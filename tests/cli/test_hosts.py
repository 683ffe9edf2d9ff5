"""A worker with ranks on two hosts, as a user starts it, and streams after the loss of a rank, a
host or the connection between them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from benchmarks.harness.ports import free_port
from benchmarks.processes import parent_of, services_of
from cli.keys import write_keys
from tests.cli.serving import Serving, is_alive, serving
from tests.cli.test_ranks import rank_of, text_of

SAME = ("--dtype", "float32", "--max-model-len", "1024")
TENSOR = "tensor-parallel-size"
LOST = "silent for 2 s"


def flags_of(
    node: int, num_ranks: int, address: str, port: int, keys: Path, kind: str = TENSOR
) -> list[str]:
    return [
        *(*SAME, f"--{kind}", str(num_ranks), "--nnodes", "2"),
        *("--node-rank", str(node), "--master-addr", address, "--master-port", str(port)),
        *("--keys", str(keys)),
    ]


@asynccontextmanager
async def two_hosts(
    folder: Path, num_ranks: int, kind: str = TENSOR
) -> AsyncIterator[list[Serving]]:
    """Both hosts are this machine."""
    write_keys(folder / "keys")
    port = free_port(2)  # the next one is the ranks' first rendezvous
    keys = folder / "keys"
    first, second = (flags_of(n, num_ranks, "127.0.0.1", port, keys, kind) for n in range(2))
    async with serving(folder / "b", *second) as b, serving(folder / "a", *first) as a:
        await a.until_ready()
        yield [a, b]


def pids_of(shoal: Serving, child: int | None = None) -> set[int]:
    """The ranks of the host that started rank ``child``."""
    if child is None:
        return {services_of(shoal.directory)["worker"]}
    pid = rank_of(shoal, child)
    assert pid is not None
    return {parent_of(pid), pid}


@pytest.mark.slow
async def test_a_stream_outlives_a_host_whose_rank_is_killed(tmp_path: Path) -> None:
    async with two_hosts(tmp_path, 2) as hosts, serving(tmp_path / "c", *SAME) as alone:
        await alone.until_ready()
        text = await text_of(alone)
        assert await text_of(hosts[0]) == text
        ranks = pids_of(hosts[0]) | pids_of(hosts[1])
        begun = asyncio.Event()
        running = asyncio.create_task(text_of(hosts[0], begun))
        await begun.wait()
        os.kill(services_of(hosts[1].directory)["worker"], signal.SIGKILL)
        assert await running == text
        assert not any(map(is_alive, ranks)), "a group ends as a whole"
        assert "scheduler" not in hosts[1].children()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1, 2, 3])
async def test_a_stream_outlives_any_rank_of_two_hosts(
    tmp_path: Path, number: signal.Signals, rank: int
) -> None:
    async with two_hosts(tmp_path, 4) as hosts:
        text = await text_of(hosts[0])
        ranks = pids_of(hosts[0], 1) | pids_of(hosts[1], 3)
        host, is_child = hosts[rank // 2], rank % 2
        child = rank_of(host, rank // 2 * 2 + 1)
        assert child is not None
        begun = asyncio.Event()
        running = asyncio.create_task(text_of(hosts[0], begun))
        await begun.wait()
        os.kill(child if is_child else parent_of(child), number)
        if number == signal.SIGSTOP:
            await until(hosts[0] if rank else hosts[1], LOST)
        assert await running == text
        assert not any(map(is_alive, ranks)), "a group ends as a whole"


@pytest.mark.slow
@pytest.mark.parametrize("told", [[1], [1, 0], [0, 1]])
async def test_a_stream_ends_before_a_host_that_is_told_to_stop(
    tmp_path: Path, told: list[int]
) -> None:
    """For either host, or both: no rank returns, so nobody else could end the stream."""
    async with two_hosts(tmp_path, 4) as hosts:
        text = await text_of(hosts[0])
        begun = asyncio.Event()
        running = asyncio.create_task(text_of(hosts[0], begun))
        await begun.wait()
        for node in told:
            hosts[node].process.terminate()
        assert await running == text
        for node in told:
            assert await asyncio.wait_for(hosts[node].process.wait(), 60) == 0
        if 0 not in told:
            await until(hosts[0], "a rank was told to stop")
            await until(hosts[0], "waits for ranks 2, 3")


@pytest.mark.slow
async def test_the_second_host_waits_for_the_first_one_and_takes_it_again(tmp_path: Path) -> None:
    """It starts more often than a service that fails by itself, and tells a stranger the reason."""
    write_keys(tmp_path / "keys")
    port = free_port(2)
    first, second = (flags_of(n, 2, "127.0.0.1", port, tmp_path / "keys") for n in range(2))
    other = [*first, "--block-size", "32"]
    async with serving(tmp_path / "b", *second) as b:
        for _ in range(4):
            async with serving(tmp_path / "a", *first) as a:
                await a.until_ready()
        async with serving(tmp_path / "a", *other) as a:
            await until(b, "block-size is 16, and 32 on the first host")
            await until(a, "block-size is 16, and 32 on the first host")
        async with serving(tmp_path / "a", *first) as a:
            await a.until_ready()
            assert await text_of(a)
        assert b.process.returncode is None


NAMES = [f"shoal-{os.getpid()}-{letter}" for letter in "ab"]
ADDRESSES = ("10.213.77.1", "10.213.77.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def network() -> Iterator[None]:
    """Two namespaces with a cable between them."""
    a, b = NAMES
    try:
        ip("netns", "add", a)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a network namespace of our own takes root: {error}")
    try:
        ip("netns", "add", b)
        ip("-n", a, "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", b)
        for name, address in zip(NAMES, ADDRESSES, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "cable", "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@pytest.mark.slow
async def test_a_stream_outlives_a_host_that_is_unplugged(tmp_path: Path) -> None:
    """The stream continues when the cable is back, or at once in another worker."""
    write_keys(tmp_path / "keys")
    port = free_port(2)
    first, second = (flags_of(n, 4, ADDRESSES[0], port, tmp_path / "keys") for n in range(2))
    prefixes = [["ip", "netns", "exec", name] for name in NAMES]
    with network():
        async with (
            serving(tmp_path / "b", *second, prefix=prefixes[1]) as b,
            serving(tmp_path / "a", *first, prefix=prefixes[0], uds=tmp_path / "http") as a,
        ):
            await a.until_ready()
            text = await text_of(a)
            running = await unplugged(a, b)
            ip("-n", NAMES[1], "link", "set", "cable", "up")
            assert await running == text
            async with another_worker(a, prefixes[0]) as worker:
                await stopped(worker, a)
                running = await unplugged(a, b)
                worker.send_signal(signal.SIGCONT)
                assert await running == text


async def unplugged(a: Serving, b: Serving) -> "asyncio.Task[str]":
    """Unplugs the cable during a generation, and returns its text after all ranks have ended; none
    is notified of the others."""
    ranks = pids_of(a, 1) | pids_of(b, 3)
    nums = [len(a.lines), len(b.lines)]
    begun = asyncio.Event()
    running = asyncio.create_task(text_of(a, begun))
    await begun.wait()
    ip("-n", NAMES[1], "link", "set", "cable", "down")
    async with asyncio.timeout(30):
        while any(map(is_alive, ranks)):
            await asyncio.sleep(0.02)
    for host, num in zip((a, b), nums, strict=True):
        assert any(LOST in line for line in host.lines[num:])
    return running


@asynccontextmanager
async def another_worker(
    shoal: Serving, prefix: list[str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker in the mesh of ``shoal``, with the whole model."""
    (admin,) = shoal.directory.glob("*/admin.scheduler-*.sock")
    process = await asyncio.create_subprocess_exec(
        *(*prefix, sys.executable, "-m", "services.worker", *SAME, "--num-threads", "1"),
        *("--mesh-dir", str(admin.parent), "--instance", "other"),
    )
    try:
        await until(shoal, "worker other is up")
        yield process
    finally:
        process.kill()
        await process.wait()


async def stopped(process: asyncio.subprocess.Process, shoal: Serving) -> None:
    """The scheduler has lost it, so ranks compute everything."""
    process.send_signal(signal.SIGSTOP)
    await until(shoal, "worker other is down")


async def until(shoal: Serving, text: str) -> None:
    async with asyncio.timeout(60):
        while not any(text in line for line in shoal.lines):
            await asyncio.sleep(0.05)

"""`shoal serve` keeps serving while its output is full, closed or not read."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from tests.cli.serving import serving

PIPE_BYTES = 4096


def full_disk() -> tuple[int, Callable[[], object]]:
    return os.open("/dev/full", os.O_WRONLY), lambda: None


def closed_pipe() -> tuple[int, Callable[[], object]]:
    """Like `| head -1`, which reads one line and exits."""
    read_end, write_end = os.pipe()

    def read_a_line() -> None:
        os.read(read_end, 10)
        os.close(read_end)

    return write_end, read_a_line


def unread_pipe() -> tuple[int, Callable[[], object]]:
    _, write_end = os.pipe()
    fcntl.fcntl(write_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return write_end, lambda: None


def paused_terminal() -> tuple[int, Callable[[], object]]:
    _, terminal = os.openpty()
    return terminal, lambda: None


# A full disk is an error like a closed pipe, and a paused terminal accepts as little as an unread
# pipe.
@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [closed_pipe, unread_pipe, full_disk, paused_terminal],
)
async def test_requests_are_answered_whatever_becomes_of_the_log(tmp_path: Path, make):
    descriptor, when_started = make()
    flags = ("--log-requests", "--log-level", "debug")
    async with serving(tmp_path, *flags, stdout=descriptor) as shoal:
        os.close(descriptor)
        when_started()
        await shoal.until_ready()
        body = {"prompt": "The shoal", "max_tokens": 1}
        async with aiohttp.ClientSession() as session:
            for _ in range(40):  # one line in each of four services
                async with session.post(f"{shoal.url}/v1/completions", json=body) as response:
                    assert response.status == 200
        assert shoal.process.returncode is None
    assert shoal.process.returncode == 0

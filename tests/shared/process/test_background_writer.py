"""Writing to full, closed or unread descriptors, with real ones."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from shared.process.background_writer import MAX_WAITING_BYTES, BackgroundWriter

LINE = "x" * 999 + "\n"
DROPPED = "shoal_log_lines_dropped_total"
TIMEOUT_S = 10


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read_end, write_end = os.pipe()
    yield read_end, write_end
    os.close(write_end)


def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_a_pipe_that_is_not_read_blocks_no_writer_and_dropped_lines_are_counted(change):
    read_end, write_end = os.pipe()
    reported: list[int] = []
    is_reported = threading.Event()

    def on_dropped(num: int) -> None:
        reported.append(num)
        is_reported.set()

    output = BackgroundWriter(write_end, on_dropped)
    num_lines = 4 * MAX_WAITING_BYTES // len(LINE)
    for _ in range(num_lines):
        output.write(LINE)
    num_dropped = change(DROPPED)
    assert num_dropped > num_lines / 2
    texts: list[bytes] = []
    reading = threading.Thread(target=lambda: texts.append(read_all(read_end)))
    reading.start()
    assert is_reported.wait(TIMEOUT_S)
    output.write("again\n")
    output.wait_written(TIMEOUT_S)
    os.close(write_end)
    reading.join(TIMEOUT_S)
    lines = texts[0].decode().splitlines(keepends=True)
    assert reported == [num_dropped]
    assert lines == [LINE] * int(num_lines - num_dropped) + ["again\n"]


def test_a_full_disk_costs_lines_and_nothing_else(change):
    full = os.open("/dev/full", os.O_WRONLY)
    output = BackgroundWriter(full, lambda num: None)
    for _ in range(10):
        output.write(LINE)
    output.wait_written(TIMEOUT_S)
    assert change(DROPPED) == 10
    os.close(full)


def test_a_pipe_that_was_closed_costs_lines_and_nothing_else(pipe: tuple[int, int], change):
    read_end, write_end = pipe
    output = BackgroundWriter(write_end, lambda num: None)
    output.write("read\n")
    output.wait_written(TIMEOUT_S)
    assert os.read(read_end, 100) == b"read\n"
    os.close(read_end)
    output.write("not read\n")
    output.wait_written(TIMEOUT_S)
    assert change(DROPPED) == 1


def test_a_pipe_that_another_process_made_non_blocking_gets_every_line():
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    output = BackgroundWriter(write_end, lambda num: None)
    num_lines = MAX_WAITING_BYTES // len(LINE) // 2
    for _ in range(num_lines):
        output.write(LINE)
    texts: list[bytes] = []
    reading = threading.Thread(target=lambda: texts.append(read_all(read_end)))
    reading.start()
    output.wait_written(TIMEOUT_S)
    os.close(write_end)
    reading.join(TIMEOUT_S)
    assert texts == [LINE.encode() * num_lines]


LOGS_MUCH = """
import logging, sys
from shared.settings.gateway import GatewayConfig
from shared.process.log import set_up
set_up("gateway", GatewayConfig(instance="0.1", log_format=sys.argv[1]))
for number in range(20_000):
    logging.info("line %d of a log that is not read yet", number)
print("it went on", flush=True)
sys.stdin.read()
logging.shutdown()
"""


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_service_whose_log_is_not_read_goes_on_and_logs_later_how_many_lines_are_lacking(
    log_format: str,
):
    command, pipe = [sys.executable, "-c", LOGS_MUCH, log_format], subprocess.PIPE
    process = subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    with process:
        assert process.stdout.readline() == "it went on\n"
        threading.Timer(1, process.stdin.close).start()
        lines = process.stderr.read().splitlines()
    assert process.returncode == 0
    assert 1000 < len(lines) < 20_000
    assert any("lines were dropped here" in line for line in lines)

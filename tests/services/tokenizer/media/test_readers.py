"""Processes that read images: they may die, and only one file suffers."""

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from services.tokenizer.media import reader_messages
from services.tokenizer.media import readers as module
from services.tokenizer.media.reader_messages import Answer, Targets
from services.tokenizer.media.readers import Pixels, Readers, Unreadable
from shared.errors import InvalidRequest, Unavailable
from tests.media.pictures import picture
from tests.services.tokenizer.media.files import bomb, file_of, png_of

MAX_PIXELS = 1 << 20
GOOD = file_of(picture(1, 64, 48))


class WatchedReaders(Readers):
    def __init__(self, num: int = 1) -> None:
        super().__init__(num, MAX_PIXELS)
        self.pids: list[int] = []

    async def _start(self) -> module._Child:
        child = await super()._start()
        self.pids.append(child.process.pid)
        return child


def same_size(found: Answer) -> Targets:
    return Targets((found.width, found.height), (found.height, found.width))


async def refusal(readers: Readers, file: np.ndarray) -> str:
    with pytest.raises(Unreadable) as caught:
        await readers.read(file, "", same_size)
    return str(caught.value)


async def test_a_child_reads_file_after_file():
    readers = WatchedReaders()
    for seed in range(3):
        image = picture(seed, 50 + seed, 40)
        pixels = await readers.read(file_of(image), "", same_size)
        assert (pixels.width, pixels.height) == image.size
        assert pixels.data.tobytes() == image.tobytes()
    assert len(readers.pids) == 1
    await readers.close()


async def test_files_that_are_no_images_are_refused_and_the_child_lives():
    readers = WatchedReaders()
    svg = b'<svg xmlns="http://www.w3.org/2000/svg"/>'
    tiff = file_of(picture(1, 20, 20), "TIFF")
    for file in (svg, b"<!doctype html><title>404</title>", b"\x89PNG\r\n\x1a\n", b"%!PS", tiff):
        text = await refusal(readers, np.frombuffer(bytes(file), np.uint8))
        assert text == "is no image in JPEG, PNG, WebP or GIF"
    assert (await readers.read(GOOD, "", same_size)).width == 64
    assert len(readers.pids) == 1
    await readers.close()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
async def test_cut_files_are_refused_or_read_in_part_and_the_child_lives(kind: str):
    readers = WatchedReaders()
    file = file_of(picture(2, 200, 150), kind)
    cut = [file[: len(file) * part // 10] for part in range(10)]
    read = await asyncio.gather(
        *(readers.read(each, "", same_size) for each in cut), return_exceptions=True
    )
    refused = [each for each in read if not isinstance(each, Pixels)]
    assert {str(each) for each in refused} <= {
        "is no image in JPEG, PNG, WebP or GIF",
        "is an image that cannot be decoded",
    }
    assert len(refused) == 10 or kind == "GIF"
    assert (await readers.read(GOOD, "", same_size)).width == 64
    assert len(readers.pids) == 1
    await readers.close()


async def test_large_images_are_refused_before_they_are_decoded():
    readers = WatchedReaders()
    asked: list[tuple[int, int]] = []

    def choose(found: Answer) -> Targets:
        asked.append((found.width, found.height))
        return same_size(found)

    for file, size in ((png_of(30_000, 30_000), "30000 x 30000"), (bomb(1025), "1025 x 1025")):
        with pytest.raises(Unreadable, match=f"has {size} pixels; the limit is 1048576"):
            await readers.read(file, "", choose)
    assert not asked
    assert (await readers.read(bomb(1024), "", same_size)).width == 1024
    await readers.close()


async def test_an_error_about_the_size_leaves_the_child():
    readers = WatchedReaders()

    def refuse(found: Answer) -> Targets:
        raise InvalidRequest(f"{found.width} x {found.height}")

    with pytest.raises(InvalidRequest, match="64 x 48"):
        await readers.read(GOOD, "", refuse)
    assert (await readers.read(GOOD, "", same_size)).width == 64
    assert len(readers.pids) == 1
    await readers.close()


async def test_a_child_that_is_killed_fails_its_file_alone(change: Callable[[str], float]):
    readers = WatchedReaders()

    def kill(found: Answer) -> Targets:
        os.kill(readers.pids[0], signal.SIGKILL)
        return same_size(found)

    await readers.read(GOOD, "", same_size)
    readings = [readers.read(GOOD, "", choose) for choose in (kill, same_size)]
    killed, other = await asyncio.gather(*readings, return_exceptions=True)
    assert str(killed) == "is an image that cannot be decoded"
    assert isinstance(other, Pixels)
    assert change("shoal_media_reader_deaths_total") == 1
    assert len(readers.pids) == 2
    await readers.close()


async def test_a_file_that_takes_too_long_costs_the_child(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[str], float]
):
    readers = WatchedReaders()
    await readers.read(GOOD, "", same_size)

    def stop(found: Answer) -> Targets:
        os.kill(readers.pids[0], signal.SIGSTOP)
        return same_size(found)

    monkeypatch.setattr(module, "MAX_READ_S", 0.2)
    with pytest.raises(Unreadable, match="cannot be decoded in 10 s"):
        await readers.read(GOOD, "", stop)
    monkeypatch.undo()
    assert change("shoal_media_reader_deaths_total") == 1
    assert not Path(f"/proc/{readers.pids[0]}").exists()
    assert (await readers.read(GOOD, "", same_size)).width == 64
    assert len(readers.pids) == 2
    await readers.close()


async def test_a_file_has_a_limit_of_processor_time(monkeypatch: pytest.MonkeyPatch):
    readers = WatchedReaders()
    monkeypatch.setitem(module.MAX_CPU_S, "image", 0.001)

    def enlarge(found: Answer) -> Targets:
        return Targets((3000, 3000), (3000, 3000))

    with pytest.raises(Unreadable, match=r"cannot be decoded in 0\.001 s"):
        await readers.read(GOOD, "", enlarge)
    monkeypatch.undo()
    assert (await readers.read(GOOD, "", same_size)).width == 64
    assert len(readers.pids) == 2
    await readers.close()


async def test_the_wait_for_a_thread_is_not_the_files(monkeypatch: pytest.MonkeyPatch):
    """The child's clock starts when it is asked."""
    is_over = threading.Event()
    timeout = asyncio.timeout

    def watched(delay_s: float) -> asyncio.Timeout:
        assert is_over.is_set()
        return timeout(delay_s)

    def put(fd: int, data: memoryview, place: int = 0) -> None:
        reader_messages.put(fd, data)
        is_over.set()

    readers = WatchedReaders()
    child = await readers._start()
    readers._idle.append(child)
    monkeypatch.setattr(module, "put", put)
    monkeypatch.setattr(asyncio, "timeout", watched)
    assert (await readers.read(GOOD, "", same_size)).width == 64
    monkeypatch.undo()
    await readers.close()


@pytest.mark.parametrize("is_noticed", [True, False])
async def test_a_child_that_died_idle_costs_no_file(
    change: Callable[[str], float], is_noticed: bool
):
    readers = WatchedReaders()
    await readers.read(GOOD, "", same_size)
    (idle,) = readers._idle
    os.kill(readers.pids[0], signal.SIGKILL)
    if is_noticed:
        await idle.process.wait()
    assert (await readers.read(GOOD, "", same_size)).width == 64
    assert len(readers.pids) == 2
    assert change("shoal_media_reader_deaths_total") == 0
    await readers.close()


async def test_a_file_that_ends_processes_is_given_to_two(change: Callable[[str], float]):
    class Short(WatchedReaders):
        """Its children end when they are asked."""

        async def _start(self) -> module._Child:
            child = await super()._start()
            os.kill(child.process.pid, signal.SIGKILL)
            return child

    readers = Short()
    readers._idle.append(await readers._start())
    assert await refusal(readers, GOOD) == "is an image that cannot be decoded"
    assert len(readers.pids) == 2
    assert change("shoal_media_reader_deaths_total") == 1
    await readers.close()


async def test_a_caller_may_leave_the_queue_or_during_its_read():
    readers = WatchedReaders()
    sizes: list[int] = []

    def note(found: Answer) -> Targets:
        sizes.append(found.width)
        return same_size(found)

    files = [file_of(picture(1, width, 40)) for width in (30, 31, 32)]
    first, second, third = (asyncio.create_task(readers.read(file, "", note)) for file in files)
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await third
    assert sizes == [30, 32]
    assert len(readers.pids) == 1
    await readers.close()


async def test_a_closed_pool_leaves_no_child():
    readers = WatchedReaders(2)
    await asyncio.gather(*(readers.read(GOOD, str(num), same_size) for num in range(2)))
    reading = asyncio.create_task(readers.read(GOOD, "", same_size))
    await asyncio.sleep(0)
    await readers.close()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert len(readers.pids) == 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in readers.pids)


async def test_memory_is_open_while_a_thread_writes_to_it(monkeypatch: pytest.MonkeyPatch):
    """Otherwise the next file in memory could get its number, and this one's content."""
    written: list[str] = []
    begun, may_go_on, is_done = asyncio.Event(), threading.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def put(fd: int, data: memoryview, place: int = 0) -> None:
        loop.call_soon_threadsafe(begun.set)
        may_go_on.wait()
        path = Path(f"/proc/self/fd/{fd}")
        written.append(os.readlink(path) if path.is_symlink() else "closed")
        is_done.set()

    monkeypatch.setattr(module, "put", put)
    readers = WatchedReaders()
    reading = asyncio.create_task(readers.read(GOOD, "", same_size))
    await begun.wait()
    await readers.close()
    assert not Path(f"/proc/{readers.pids[0]}").exists()
    may_go_on.set()
    await asyncio.to_thread(is_done.wait)
    assert "memfd:media" in written[0]
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_memory_is_closed_with_its_child():
    def num_open() -> int:
        links = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        return sum("memfd:media" in os.readlink(path) for path in links)

    gc.collect()
    before, readers = num_open(), WatchedReaders()
    await readers.read(GOOD, "", same_size)
    assert num_open() == before + 1
    await readers.close()
    assert num_open() == before


async def test_without_a_child_images_are_unavailable(monkeypatch: pytest.MonkeyPatch):
    readers = Readers(1, MAX_PIXELS)
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="images and videos cannot be read now"):
        await readers.read(GOOD, "", same_size)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(Unavailable, match="images and videos cannot be read now"):
        await readers.read(GOOD, "", same_size)
    monkeypatch.undo()
    assert (await readers.read(GOOD, "", same_size)).width == 64
    await readers.close()


async def test_a_child_has_no_socket_of_its_parent():
    readers = WatchedReaders()
    with socket.socket() as listening:
        listening.set_inheritable(True)
        await readers.read(GOOD, "", same_size)
    folder = Path(f"/proc/{readers.pids[0]}/fd")
    found = {path.name: os.readlink(path) for path in folder.iterdir()}
    memory = {number for number, target in found.items() if "memfd:media" in target}
    assert len(memory) == 1
    assert set(found) - memory == {"0", "1", "2"}
    await readers.close()


PARENT = """
import asyncio, os, signal
from services.tokenizer.media.readers import Readers

async def main():
    readers = Readers(1, 1000)
    child = await readers._start()
    os.kill(child.process.pid, signal.SIGSTOP)  # so that it cannot end by itself
    print(child.process.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


def test_a_child_dies_with_its_parent():
    done = subprocess.run([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, check=False)
    assert done.returncode == -signal.SIGKILL
    status = Path(f"/proc/{int(done.stdout)}/status")
    while status.exists() and "zombie" not in status.read_text():
        pass


def test_pillow_is_in_the_children_alone():
    code = "import sys, services.tokenizer.service; assert 'PIL' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)

"""The mesh directory as a source of addresses."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from shared.link import sources
from shared.link.address import find_sockets
from shared.link.sources import SocketDirectory


@pytest.fixture
def listings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The listed directories, one for each listing."""
    seen: list[Path] = []

    def noted(directory: Path, *which: Any) -> set[Path]:
        seen.append(directory)
        return find_sockets(directory, *which)

    monkeypatch.setattr(sources, "find_sockets", noted)
    monkeypatch.setattr(sources, "LIST_S", 0.001)
    return seen


async def until(is_true) -> None:
    async with asyncio.timeout(10):
        while not is_true():
            await asyncio.sleep(0.01)


async def test_a_directory_is_listed_when_it_has_changed(tmp_path: Path, listings: list[Path]):
    long_ago = os.stat(tmp_path).st_mtime - 60
    os.utime(tmp_path, (long_ago, long_ago))
    source = SocketDirectory(tmp_path, "tokenizer", "")
    running = asyncio.create_task(source.run())
    await until(lambda: listings)
    await asyncio.sleep(0.1)
    assert len(listings) == 1
    for name in ("tokenizer-0.sock", "tokenizer-1.sock"):  # perhaps in one tick of the clock
        (tmp_path / name).touch()
        await until(lambda name=name: f"ipc://{tmp_path / name}" in source.addresses)
    (tmp_path / "tokenizer-0.sock").unlink()
    await until(lambda: source.addresses == {f"ipc://{tmp_path / 'tokenizer-1.sock'}"})
    running.cancel()

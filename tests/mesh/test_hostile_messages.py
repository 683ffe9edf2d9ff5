"""No message ends a service: a bad one ends its sender's connection or fails its own request."""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from benchmarks.harness.engines import make_engine
from shared.codec import encode
from shared.messages import Message
from tests.mesh.arenas import (
    Example,
    GatewayArena,
    SchedulerArena,
    TokenizerArena,
    WorkerArena,
)
from tests.mesh.hostile import odd_versions, with_turned_bits
from tests.services.worker.checkpoints import save_qwen2


class Arena(Protocol):
    examples: list[Example]
    lies: dict[str, tuple[int, Message, list[np.ndarray]]]

    async def take(self, index: int, frames: list[bytes]) -> bool: ...


def worker(kernels: str) -> Callable[[Path], Arena]:
    def make(directory: Path) -> Arena:
        save_qwen2(directory)
        return WorkerArena(make_engine(directory, kernels))

    return make


ARENAS: dict[str, Callable[[Path], Arena]] = {
    "scheduler": SchedulerArena,
    "tokenizer": TokenizerArena,
    "gateway": lambda directory: GatewayArena(),
    "worker": worker("native"),
    "worker with torch's operators": worker("torch"),
    "worker on a device": worker("device"),
}


NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("worker ") else name
    for name in ARENAS
]


@pytest.fixture(params=NAMES)
async def arena(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Arena]:
    arena = ARENAS[request.param](tmp_path)
    yield arena
    if isinstance(arena, SchedulerArena):
        await arena.close()


async def test_a_right_message_is_let_through_and_one_with_two_faults_is_not(arena: Arena):
    for index, (message, arrays) in enumerate(arena.examples):
        assert await arena.take(index, frames_of(message, arrays)), message
    for name, (index, message, arrays) in arena.lies.items():
        assert not await arena.take(index, frames_of(message, arrays)), name


def frames_of(message: Message, arrays: list[np.ndarray]) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


async def test_every_field_at_its_odd_values_is_survived(arena: Arena):
    for index, (message, arrays) in enumerate(arena.examples):
        for odd in odd_versions(message, arrays):
            try:
                await arena.take(index, odd.frames)
            except Exception as error:
                error.add_note(f"{index}: {odd.name}")
                raise


async def test_turned_bits_are_survived(arena: Arena):
    await turn_bits(arena, 400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_turned_bits_are_survived(arena: Arena):
    await turn_bits(arena, 35_000)


async def turn_bits(arena: Arena, num: int) -> None:
    dice = random.Random(7)
    for _ in range(num):
        index = dice.randrange(len(arena.examples))
        odd = with_turned_bits(*arena.examples[index], dice)
        try:
            await arena.take(index, odd.frames)
        except Exception as error:
            error.add_note(f"{index}: {odd.name}")
            raise

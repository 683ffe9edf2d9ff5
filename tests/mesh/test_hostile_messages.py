"""No message ends a service: a bad one ends its sender's connection or fails its own request."""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import numpy as np
import pytest

from benchmarks.harness.engines import make_engine
from shared.codec import Array, decode, encode
from shared.errors import CodecError
from shared.messages import Message
from tests.mesh.arenas import (
    Example,
    GatewayArena,
    SchedulerArena,
    TokenizerArena,
    WorkerArena,
)
from tests.mesh.hostile import Odd, odd_versions, with_turned_bits
from tests.mesh.link_arena import LinkArena
from tests.services.worker.checkpoints import save_qwen2


class Arena(Protocol):
    examples: list[Example]
    lies: dict[str, tuple[int, Message, list[np.ndarray]]]

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool: ...


def worker(kernels: str) -> Callable[[Path], Arena]:
    def make(directory: Path) -> Arena:
        save_qwen2(directory)
        return WorkerArena(make_engine(directory, kernels), kernels == "native")

    return make


ARENAS: dict[str, Callable[[Path], Arena]] = {
    "scheduler": SchedulerArena,
    "link of a scheduler": LinkArena,
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
    if isinstance(arena, SchedulerArena | LinkArena):
        await arena.close()


async def test_a_right_message_is_let_through_and_one_with_two_faults_is_not(arena: Arena):
    for index, (message, arrays) in enumerate(arena.examples):
        assert await take(arena, index, frames_of(message, arrays)), message
    for name, (index, message, arrays) in arena.lies.items():
        assert not await take(arena, index, frames_of(message, arrays)), name


async def take(arena: Arena, index: int, frames: list[bytes]) -> bool:
    try:
        decoded = decode(frames)
    except CodecError:
        return False
    return await arena.take(index, *decoded)


def frames_of(message: Message, arrays: list[np.ndarray]) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


async def survive(arena: Arena, index: int, odd: Odd) -> None:
    try:
        await take(arena, index, odd.frames)
    except Exception as error:
        error.add_note(f"{index}: {odd.name}")
        raise


async def test_every_field_at_its_odd_values_is_survived(arena: Arena):
    for index, (message, arrays) in enumerate(arena.examples):
        for odd in odd_versions(message, arrays):
            await survive(arena, index, odd)


async def test_turned_bits_are_survived(arena: Arena):
    await turn_bits(arena, 400)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_turned_bits_are_survived(arena: Arena):
    """200,000 with those of all arenas, fewer where a step takes long: plans are checked alike."""
    is_slow = isinstance(arena, WorkerArena) and not arena.is_native
    await turn_bits(arena, 20_000 if is_slow else 32_000)


async def turn_bits(arena: Arena, num: int) -> None:
    """One example after the other, since an arena that is prepared for it takes the next sooner."""
    dice = random.Random(7)
    for index, example in enumerate(arena.examples):
        for _ in range(-(-num // len(arena.examples))):
            await survive(arena, index, with_turned_bits(*example, dice))

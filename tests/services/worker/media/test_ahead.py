"""Images are encoded ahead: other steps go on, and the scheduler hears how far a prompt may go."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.engines import make_engine
from benchmarks.harness.step_engine import run_step
from services.worker.extension import WorkerCore
from services.worker.media.addition import Media
from services.worker.media.extension import WorkerMedia
from services.worker.media.item_check import uncached_items
from services.worker.step_thread import StepThread
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    MEDIA_MINOR,
    PROTOCOL_MAJOR,
    Admit,
    Decode,
    Encoded,
    Hello,
    Prefill,
    StepPlan,
)
from tests.media.pictures import picture
from tests.media.references import Reference
from tests.mesh.arena_parts import NO_IDS, FakePeer
from tests.services.worker.driver import Driver
from tests.services.worker.media.gates import WAIT_S, Gate
from tests.services.worker.media.prompts import GREEDY, NUM_TOKENS, Chat, chat

SLOTS = 3


def scheduler(minor: int = MEDIA_MINOR) -> FakePeer:
    return FakePeer(Hello(PROTOCOL_MAJOR, minor, "scheduler", "s"))


class Worker:
    """An engine with a gate. ``texts`` has the ids sampled in each slot."""

    def __init__(self, folder: Path) -> None:
        self.engine = make_engine(
            folder, "native", max_model_len=256, max_num_seqs=SLOTS, max_num_batched_tokens=256
        )
        (addition,) = self.engine.additions
        assert isinstance(addition, Media)
        self.encoder = addition.encoder
        self.gate = Gate(self.encoder._encode)
        self.encoder._encode = self.gate
        self.texts: dict[int, list[int]] = {}
        self._tables = Driver(self.engine)._tables(SLOTS)

    def admit(self, slot: int, chat: Chat) -> Admit:
        self.texts[slot] = []
        num, (blocks,) = len(chat.expected.prompt_ids), self._tables[slot]
        row = slot, f"r{slot}", 1, 0, 0, num, num, 0, GREEDY, blocks
        return Admit(*row, items=chat.items)

    def step(self, *rows: Prefill | Decode, admit: dict[int, Chat] | None = None) -> StepPlan:
        chats = admit or {}
        plan = StepPlan(
            1,
            [slot for slot in chats if slot in self.texts],
            [self.admit(*each) for each in chats.items()],
            [],
            [row for row in rows if isinstance(row, Prefill)],
            [row for row in rows if isinstance(row, Decode)],
        )
        known: dict[bytes, np.ndarray] = {}
        for each in chats.values():
            known |= each.pixels
        pixels = [known[digest] for digest in uncached_items(plan)]
        ids = [np.array(each.expected.prompt_ids, np.int32) for each in chats.values()]
        result, arrays = run_step(self.engine, plan, np.concatenate([NO_IDS, *ids]), pixels)
        ends = np.cumsum([row.run.num_tokens for row in result.rows])
        for row, end in zip(result.rows, ends, strict=True):
            self.texts[row.slot] += arrays.ids[end - row.run.num_tokens : end].tolist()
        return plan


@pytest.fixture
def worker(folder: Path) -> Iterator[Worker]:
    worker = Worker(folder)
    yield worker
    worker.gate.open()


@pytest.fixture(scope="session")
def text(oracle: Reference) -> Chat:
    return chat(oracle, "No picture at all.")


@pytest.fixture(scope="session")
def two(oracle: Reference) -> Chat:
    return chat(oracle, "Of ", picture(1, 84, 140), " and ", picture(2, 56, 84), ": one?")


class Mesh:
    """The extension of ``worker``, attached to ``home``."""

    def __init__(self, worker: Worker) -> None:
        self.home: FakePeer | None = scheduler()
        self._worker = worker
        core = WorkerCore(WorkerConfig(), worker.engine, StepThread(), list, lambda: self.home)
        self.extension = WorkerMedia(core)

    def step(self, *rows: Prefill | Decode, admit: dict[int, Chat] | None = None) -> None:
        plan = self._worker.step(*rows, admit=admit)
        sizes = [item.num_bytes for item in uncached_items(plan).values()]
        self.extension.check(plan, [np.zeros(size, np.uint8) for size in sizes])

    async def until_idle(self) -> None:
        done = self._worker.encoder._thread.submit(lambda: None)
        async with asyncio.timeout(WAIT_S):
            await asyncio.wrap_future(done)

    async def said(self) -> list[tuple[str, int]]:
        """Since the last look."""
        await self.until_idle()
        assert self.home is not None
        return [(each.request, each.num_ids) for each, _ in self.home.take(Encoded)]


async def test_a_text_goes_on_while_an_image_is_encoded(
    worker: Worker, text: Chat, two: Chat
) -> None:
    mesh = Mesh(worker)
    num_text, num = len(text.expected.prompt_ids), len(two.expected.prompt_ids)
    first, second = (item.start for item in two.items)
    mesh.step(Prefill(0, num_text), Prefill(1, first), admit={0: text, 1: two})
    for _ in range(NUM_TOKENS - 1):
        mesh.step(Decode(0))
    assert worker.texts[0] == text.expected.ids
    assert not worker.texts[1]
    worker.gate.open()
    assert await mesh.said() == [("r1", second), ("r1", num)]
    mesh.step(Prefill(1, num - first))
    for _ in range(NUM_TOKENS - 1):
        mesh.step(Decode(1))
    assert worker.texts[1] == two.expected.ids
    assert len(worker.gate.rest) == 2


async def test_texts_and_cached_features_make_no_one_wait(
    worker: Worker, text: Chat, two: Chat
) -> None:
    worker.gate.open()
    mesh, num = Mesh(worker), len(two.expected.prompt_ids)
    mesh.step(admit={0: text, 1: two})
    second = two.items[1].start
    assert await mesh.said() == [("r1", second), ("r1", num)]
    mesh.step(admit={2: two, 1: text})
    assert await mesh.said() == [("r2", num)]
    assert len(worker.gate.rest) == 2


async def test_a_step_waits_for_an_image_that_it_needs(worker: Worker, two: Chat) -> None:
    mesh, num = Mesh(worker), len(two.expected.prompt_ids)
    worker.gate.open_once_awaited(worker.encoder)
    mesh.step(Prefill(0, num), admit={0: two})
    for _ in range(NUM_TOKENS - 1):
        mesh.step(Decode(0))
    assert worker.texts[0] == two.expected.ids


async def test_no_other_scheduler_hears_of_it(worker: Worker, two: Chat) -> None:
    """An older one, none, or the next one."""
    mesh = Mesh(worker)
    for home in (scheduler(MEDIA_MINOR - 1), None, scheduler()):
        mesh.step(admit={0: two})
        mesh.home = home
        if home is not None and home.hello.minor == MEDIA_MINOR:
            mesh.extension.clear()
            worker.engine.reset()
        worker.gate.open()
        await mesh.until_idle()
        assert home is None or not home.got


async def test_slots_that_were_reset_are_not_encoded(worker: Worker, two: Chat) -> None:
    mesh = Mesh(worker)
    mesh.step(admit={0: two})
    worker.gate.begun.get(timeout=WAIT_S)
    worker.engine.reset()
    worker.gate.open()
    assert await mesh.said() == []
    assert not worker.gate.rest


async def test_an_error_ends_the_service(worker: Worker, two: Chat) -> None:
    def fail(pixels: np.ndarray) -> Any:
        raise ValueError("broken")

    worker.encoder._encode = fail
    caught: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: caught.append(context.get("exception")))
    mesh = Mesh(worker)
    mesh.step(admit={0: two})
    await mesh.until_idle()
    (error,) = caught
    assert isinstance(error, ValueError)
    with pytest.raises(RuntimeError, match="encoder"):
        mesh.step(Prefill(0, len(two.expected.prompt_ids)))

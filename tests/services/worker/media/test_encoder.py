"""The order of the thread that encodes images, its reports, and the features it keeps."""

import os
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import get_native_id

import numpy as np
import pytest
import torch

from services.worker.media.encoder import Encoder, Job
from shared.wire.messages import Item
from tests.services.worker.media.gates import WAIT_S, Gate

BYTES = 8  # of the features of an image, two tokens
TASKS = Path("/proc/self/task")


def encode(pixels: np.ndarray) -> torch.Tensor:
    return torch.full((2, BYTES // 2), int(pixels.flat[0]), dtype=torch.uint8)


class Setup:
    """An encoder with a gate. ``told`` has its reports of jobs."""

    def __init__(self, max_bytes: int = 1000) -> None:
        self.gate = Gate(encode)
        self.encoder = Encoder(self.gate, max_bytes, num_threads=1)
        self.told: SimpleQueue[tuple[str, int, int]] = SimpleQueue()
        self.errors: SimpleQueue[Exception] = SimpleQueue()
        self.encoder.on_encoded = lambda *told: self.told.put(told)
        self.encoder.on_error = self.errors.put

    def add(self, name: str, *numbers: int) -> Job:
        """Items of two ids, with one between them."""
        items = [
            Item(start=3 * place, num_tokens=2, size=(1, 1, 1), digest=bytes([number]) * 16)
            for place, number in enumerate(numbers)
        ]
        pixels = {item.digest: np.full(3, item.digest[0], np.uint8) for item in items}
        job = Job(name, 1, 3 * len(items), items, pixels)
        self.encoder.add(job)
        return job

    def wait(self) -> None:
        """Until the thread has nothing to do."""
        self.encoder._thread.submit(lambda: None).result(WAIT_S)

    def said(self) -> list[tuple[str, int]]:
        told = [self.told.get() for _ in range(self.told.qsize())]
        return [(name, num_ids) for name, _, num_ids in told]


@pytest.fixture
def setup() -> Iterator[Setup]:
    setup = Setup()
    yield setup
    setup.gate.open()


def test_images_are_encoded_in_the_order_of_admission(setup: Setup) -> None:
    setup.add("a", 1, 2)
    setup.add("b", 3, 4)
    setup.gate.open()
    setup.wait()
    assert setup.gate.rest == [1, 2, 3, 4]
    assert setup.said() == [("a", 3), ("a", 6), ("b", 3), ("b", 6)]


def test_equal_images_are_encoded_once_and_kept_ones_reported_at_once(setup: Setup) -> None:
    setup.add("a", 1, 2)
    setup.add("b", 2, 1, 2)
    setup.gate.open()
    setup.wait()
    assert setup.said() == [("a", 3), ("a", 6), ("b", 9)]
    setup.add("c", 1, 2, 3)
    assert setup.said()[:1] == [("c", 6)]
    setup.wait()
    assert setup.gate.rest == [1, 2, 3]


def test_a_job_that_is_dropped_is_not_encoded_further_or_told(setup: Setup) -> None:
    job = setup.add("a", 1, 2)
    assert setup.gate.begun.get(timeout=WAIT_S) == 1
    setup.encoder.drop(job)
    setup.encoder.drop(job)
    setup.add("b", 3)
    setup.gate.open()
    setup.wait()
    assert setup.gate.rest == [3]
    assert setup.said() == [("b", 3)]
    setup.add("c", 1)
    assert setup.said() == [("c", 3)], "the image under way is kept"


def test_an_item_awaited_by_a_step_is_encoded_next(setup: Setup) -> None:
    setup.add("a", 1, 2)
    job = setup.add("b", 3, 4)
    setup.gate.open_once_awaited(setup.encoder)
    assert setup.gate.begun.get(timeout=WAIT_S) == 1
    found = setup.encoder.features(job, job.items[1])
    assert found.tolist() == encode(np.array([4])).tolist()
    setup.wait()
    assert setup.gate.rest == [4, 2, 3]
    assert setup.said() == [("a", 3), ("a", 6), ("b", 6)]


def test_it_pauses_while_features_that_are_needed_fill_the_memory() -> None:
    setup = Setup(max_bytes=BYTES)
    setup.gate.open()
    first, second = setup.add("a", 1, 2, 3), setup.add("b", 4)
    setup.wait()
    assert setup.gate.rest == [1, 2], "the limit and one more"
    setup.encoder.note_computed(first, 2)
    setup.wait()
    assert setup.gate.rest == [3]
    assert setup.encoder.features(second, second.items[0]).tolist() == [[4] * 4] * 2
    assert setup.gate.rest == [4], "for a step it goes on"
    assert setup.encoder.features(first, first.items[0]).tolist() == [[2] * 4] * 2
    setup.encoder.drop(first)
    setup.wait()
    assert not setup.gate.rest, "each was kept as long as it was needed"
    third = setup.add("c", 1)
    setup.wait()
    assert setup.gate.rest == [1], "and no longer"
    setup.encoder.drop(third)


def test_an_error_is_told_and_ends_the_step_that_waits() -> None:
    """As no error of the step: an engine fails the prompts of a step without memory."""
    setup = Setup()

    def fail(pixels: np.ndarray) -> torch.Tensor:
        raise torch.OutOfMemoryError("broken")

    setup.encoder._encode = fail
    job = setup.add("a", 1)
    assert str(setup.errors.get(timeout=WAIT_S)) == "broken"
    with pytest.raises(RuntimeError, match="encoder") as raised:
        setup.encoder.features(job, job.items[0])
    assert not isinstance(raised.value, torch.OutOfMemoryError)


def test_it_begins_nothing_once_closed(setup: Setup) -> None:
    setup.add("a", 1, 2)
    assert setup.gate.begun.get(timeout=WAIT_S) == 1
    setup.encoder.close()
    setup.gate.open()
    setup.wait()
    assert not setup.gate.rest


def test_its_threads_are_its_own_and_yield_to_others() -> None:
    before = torch.get_num_threads()
    found: list[tuple[int, list[int]]] = []

    def look(pixels: np.ndarray) -> torch.Tensor:
        others = {*TASKS.iterdir()}
        torch.ones(1 << 20).exp()  # large enough for several threads
        threads = [get_native_id(), *(int(each.name) for each in {*TASKS.iterdir()} - others)]
        nices = [os.getpriority(os.PRIO_PROCESS, each) for each in threads]
        found.append((torch.get_num_threads(), nices))
        return encode(pixels)

    setup = Setup()
    setup.encoder = Encoder(look, 1000, num_threads=before + 1)
    setup.add("a", 1)
    setup.wait()
    ((num_threads, nices),) = found
    assert num_threads == before + 1
    assert nices == [min(os.nice(0) + 10, 19)] * (before + 1)
    assert torch.get_num_threads() == before

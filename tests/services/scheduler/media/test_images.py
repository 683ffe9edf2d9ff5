"""Images in the scheduler: their pixels, and the hashes of blocks that stand for them."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from services.scheduler.media.cell import CellMedia, EncodingRoom, note_encoded
from services.scheduler.resource import Resource
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import Arrival, Sequence
from services.scheduler.service import SchedulerService
from shared.errors import CodecError, Unavailable
from shared.settings.scheduler import SchedulerConfig
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    MEDIA_MINOR,
    PROTOCOL_MAJOR,
    Accepted,
    Attach,
    Cancel,
    Capacity,
    Failed,
    Generate,
    Hello,
    Item,
    ModelInfo,
    NewSequence,
    RequestKey,
    SamplingParams,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.scheduler.simulated_worker import SimulatedWorker

SIZE, NUM_BYTES = (1, 4, 8), 96
CAPACITY = Capacity(32, 4, 4, 16, 64, 1000, media=("image",))
PROMPT = np.arange(16, dtype=np.int32)


def item(start: int, letter: str, num_tokens: int = 3) -> Item:
    return Item(start=start, num_tokens=num_tokens, size=SIZE, digest=16 * letter.encode())


def pixels_of(letter: str) -> np.ndarray:
    return np.full(NUM_BYTES, ord(letter), np.uint8)


def arrival(*items: Item, name: str = "r", num: int = 1, **options: Any) -> Arrival:
    letters = dict.fromkeys(each.digest[:1].decode() for each in items)
    sequences = [NewSequence(f"{name}~1/0/{choice}", choice) for choice in range(num)]
    row = write_options(RequestOptions(**options))
    params = SamplingParams(seed=0, max_tokens=4)
    generate = Generate(f"{name}~1/0", 1, params, sequences, options=row, items=[*items])
    return Arrival(generate, PROMPT, PROMPT[:0], 0, 0.0, [*map(pixels_of, letters)])


def scheduler() -> tuple[Scheduler, SimulatedWorker]:
    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w", CAPACITY, resources=[EncodingRoom(replace(CAPACITY, max_num_seqs=100))])
    return core, SimulatedWorker(CAPACITY)


def encode(core: Scheduler, planned: Planned) -> None:
    for row in planned.plan.admit:
        note_encoded(core.sequences[row.request, row.attempt], row.prompt_len)


def run(core: Scheduler, worker: SimulatedWorker) -> list[Planned]:
    """The plans until all sequences have ended."""
    plans = []
    while planned := core.plan("w"):
        plans.append(planned)
        core.absorb("w", *worker.step(planned))
        encode(core, planned)
    assert not core.sequences
    return plans


def test_an_admitted_sequence_brings_its_items_and_the_pixels_to_encode():
    core, worker = scheduler()
    items = [item(1, "a"), item(5, "b"), item(9, "a", 4)]
    core.add(arrival(*items, num=2))
    first, *others = run(core, worker)
    assert [row.items for each in (first, *others) for row in each.plan.admit] == [items, items]
    assert [each.tolist() for each in first.pixels] == [[97] * NUM_BYTES, [98] * NUM_BYTES]
    (late,) = (each for each in others if each.plan.admit)
    assert [each.tolist() for each in late.pixels] == [[97] * NUM_BYTES], (
        "of the rest of the prompt"
    )


def num_cached(core: Scheduler, worker: SimulatedWorker, found: Arrival) -> int:
    core.add(found)
    plans = run(core, worker)
    (row,) = (row for each in plans for row in each.plan.admit)
    return row.num_cached


def test_ids_alone_do_not_name_a_block():
    core, worker = scheduler()
    assert num_cached(core, worker, arrival(item(5, "a", 6))) == 0
    assert num_cached(core, worker, arrival(item(5, "a", 6))) == 12
    assert num_cached(core, worker, arrival(item(5, "b", 6))) == 4, "another image"
    assert num_cached(core, worker, arrival(item(6, "a", 5))) == 4, "another place"
    assert num_cached(core, worker, arrival()) == 4, "no image"
    assert num_cached(core, worker, arrival(item(5, "a", 6), item(12, "c"))) == 12, "a later image"
    assert num_cached(core, worker, arrival(item(5, "a", 6), salt="mine")) == 0


def chunks(planned: Planned | None) -> list[int]:
    return [] if planned is None else [row.num_tokens for row in planned.plan.prefill]


def test_a_prompt_is_computed_as_far_as_its_images_are_encoded_and_holds_up_nobody():
    core, worker = scheduler()
    core.add(arrival(item(2, "a"), item(7, "b")))
    core.add(arrival(name="text"))
    first = core.plan("w")
    assert chunks(first) == [2, 14], "up to the image, and a part of the text"
    core.absorb("w", *worker.step(first))
    with_image = core.sequences["r~1/0/0", 1]
    second = core.plan("w")
    assert chunks(second) == [2], "of the text"
    note_encoded(with_image, 7)
    core.absorb("w", *worker.step(second))
    third = core.plan("w")
    assert chunks(third) == [5], "up to the second image"
    core.absorb("w", *worker.step(third))
    note_encoded(with_image, 16)
    assert chunks(core.plan("w")) == [9]


def test_a_hit_that_ends_in_an_image_awaits_it():
    core, worker = scheduler()
    core.add(arrival(item(1, "a", 6)))
    run(core, worker)
    core.add(arrival(item(1, "a", 6), item(10, "b", 5)))
    planned = core.plan("w")
    assert planned is not None
    assert planned.plan.admit[0].num_cached == 8
    assert chunks(planned) == [2]


class Loaded(Resource):
    """The first ids of each sequence."""

    def take(self, sequence: Sequence) -> None:
        sequence.allocated.num_computed = 12


def test_images_among_loaded_ids_are_not_awaited():
    """Whatever the order of a worker's resources."""
    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w", CAPACITY, resources=[EncodingRoom(CAPACITY), Loaded()])
    core.add(arrival(item(2, "a"), item(7, "b")))
    assert chunks(core.plan("w")) == [4]


def whole(**sizes: int) -> tuple[Scheduler, SimulatedWorker]:
    """A worker that computes each image in one step."""
    capacity = replace(CAPACITY, media=(), whole_media=("image",), **sizes)
    core = Scheduler(max_waiting=10, priority_step_s=10)
    core.add_worker("w", capacity, resources=[EncodingRoom(replace(capacity, max_num_seqs=100))])
    return core, SimulatedWorker(capacity)


def chunk_ends(plans: list[Planned]) -> list[int]:
    ends = np.cumsum([each for planned in plans for each in chunks(planned)])
    return list(map(int, ends))


def test_no_chunk_ends_in_an_image_that_is_computed_whole():
    """Steps before an image leave room for it."""
    core, worker = whole(max_num_batched_tokens=8)
    core.add(arrival(item(2, "a", 5), item(9, "b", 4)))
    assert chunk_ends(run(core, worker)) == [2, 7, 9, 14, 16]
    core, worker = whole(max_num_batched_tokens=12)
    core.add(arrival(item(2, "a", 5), item(9, "b", 4)))
    assert chunk_ends(run(core, worker)) == [2, 9, 16]


def test_an_image_is_computed_whole_beside_others():
    """Every plan has at most the worker's tokens, and none waits for ever."""
    core, worker = whole(max_num_batched_tokens=8)
    items = [item(0, "a", 5), item(5, "b", 5), item(11, "a", 5)]
    for name in ("one", "two", "three"):
        core.add(arrival(*items, name=name, num=1 + (name == "two")))
    plans = run(core, worker)
    for planned in plans:
        num = sum(chunks(planned)) + len(planned.plan.decode)
        assert num <= 8
    starts: dict[int, int] = {}
    for planned in plans:
        starts |= {row.slot: row.num_cached for row in planned.plan.admit}
        for row in planned.plan.prefill:
            starts[row.slot] += row.num_tokens
            assert not any(each.start < starts[row.slot] < each.end for each in items)


def test_a_hit_may_end_in_an_image_that_is_computed_whole():
    """The rest of the image is computed at once."""
    core, worker = whole(max_num_batched_tokens=8)
    core.add(arrival(item(2, "a", 8)))
    run(core, worker)
    core.add(arrival(item(2, "a", 8), item(11, "b")))
    plans = run(core, worker)
    (row,) = (row for each in plans for row in each.plan.admit)
    assert row.num_cached == 8
    assert chunk_ends(plans) == [2, 8]


def test_a_step_spares_no_room_for_images_that_are_computed():
    core, worker = whole(max_num_batched_tokens=8)
    core.add(arrival(item(0, "a", 7), item(7, "b", 2)))
    assert chunk_ends(run(core, worker)) == [7, 14, 16]


def test_an_image_of_more_tokens_than_a_step_is_refused():
    core, _ = whole(max_num_batched_tokens=6)
    core.add(arrival(item(2, "a", 6)))
    with pytest.raises(Unavailable, match="no worker has both the room and the resources"):
        core.add(arrival(item(2, "b", 7), name="large"))


def test_texts_have_the_whole_budget_of_such_a_worker():
    core, worker = whole(max_num_batched_tokens=8)
    core.add(arrival(name="text"))
    assert chunk_ends(run(core, worker)) == [8, 16]


def test_an_image_that_is_encoded_when_a_worker_dies_is_a_suspect():
    core, worker = scheduler()
    core.add(arrival(item(0, "a")))
    core.add(arrival(name="text"))
    core.absorb("w", *worker.step(core.plan("w")))
    core.remove_worker("w", now_s=0.0)
    deaths = {each.request: each.num_worker_deaths for each in core.sequences.values()}
    assert deaths == {"r~1/0/0": 1, "text~1/0/0": 0}


@pytest.mark.parametrize(
    "items",
    [[item(4, "a"), item(6, "b")], [item(4, "a"), item(1, "b")], [item(14, "a")]],
    ids=["overlapping", "backwards", "beyond the prompt"],
)
def test_items_that_do_not_fit_their_prompt_are_no_message(items: list[Item]):
    with pytest.raises(CodecError, match="an item from"):
        arrival(*items)


def test_pixels_that_do_not_fit_their_items_are_no_message():
    good = arrival(item(4, "a"))
    for pixels in ([], [pixels_of("a")[1:]], 2 * [pixels_of("a")]):
        with pytest.raises(CodecError, match="pixels"):
            Arrival(good.generate, PROMPT, PROMPT[:0], 0, 0.0, pixels)


class Mesh:
    """A scheduler between a tokenizer and a worker."""

    def __init__(self, folder: Path, capacity: Capacity = CAPACITY, **settings: Any) -> None:
        config = SchedulerConfig(mesh_dir=folder, instance="s", **settings)
        self.service = SchedulerService(config)
        model = ModelInfo(["m"], "f", 1000, 64, 1)
        about = PROTOCOL_MAJOR, MEDIA_MINOR
        self.tokenizer = FakePeer(Hello(*about, "tokenizer", "t", model))
        self.worker = FakePeer(Hello(*about, "worker", "w", model, capacity))
        for each in (self.tokenizer, self.worker):
            self.service.on_up(each)
        self.service.on_message(self.worker, Attach(), [])

    @property
    def media(self) -> CellMedia:
        (found,) = (each for each in self.service._extensions if isinstance(each, CellMedia))
        return found

    def ask(self, *items: Item, name: str = "r", attempt: int = 1) -> Accepted | Failed:
        """Its request's answer."""
        given = arrival(*items, name=name)
        given.generate = replace(given.generate, attempt=attempt)
        arrays = [given.prompt, given.emitted, *given.pixels]
        self.service.on_message(self.tokenizer, given.generate, arrays)
        ((answer, _),) = self.tokenizer.take((Accepted, Failed))
        assert isinstance(answer, Accepted | Failed)
        return answer


async def test_a_worker_for_texts_alone_is_a_clear_error(tmp_path: Path):
    mesh = Mesh(tmp_path, Capacity(32, 4, 4, 16, 64, 1000))
    failed = mesh.ask(item(4, "a"))
    assert isinstance(failed, Failed)
    assert (failed.status, failed.message) == (400, "the workers of this model take no images")
    assert isinstance(mesh.ask(name="text"), Accepted)
    replayed = mesh.ask(item(4, "a"), attempt=2)
    assert isinstance(replayed, Failed)
    assert (replayed.status, replayed.code) == (503, "no_worker")


async def test_a_video_is_for_workers_that_take_videos(tmp_path: Path):
    video = replace(item(4, "a"), kind="video")
    failed = Mesh(tmp_path, CAPACITY).ask(video)
    assert isinstance(failed, Failed)
    assert (failed.status, failed.message) == (400, "the workers of this model take no videos")
    mesh = Mesh(tmp_path, replace(CAPACITY, more_media=("video",)))
    assert isinstance(mesh.ask(video, item(8, "b")), Accepted)


def test_an_isolated_sequence_that_awaits_an_image_stops_no_stream():
    core, worker = scheduler()
    core.add(arrival(name="text"))
    core.absorb("w", *worker.step(core.plan("w")))
    core.add(arrival(item(0, "a"), num_worker_deaths=1))
    assert core.sequences["r~1/0/0", 1].is_isolated
    steps = 0
    while core.sequences.get(("text~1/0/0", 1)):
        planned = core.plan("w")
        assert planned is not None, "the text waits for the image"
        core.absorb("w", *worker.step(planned))
        steps += 1
    assert steps < 10


def test_a_late_message_of_an_earlier_admission_changes_nothing():
    core, worker = scheduler()
    core.add(arrival(item(2, "a"), item(7, "b")))
    core.absorb("w", *worker.step(core.plan("w")))
    sequence = core.sequences["r~1/0/0", 1]
    note_encoded(sequence, 16)
    note_encoded(sequence, 7)
    assert chunks(core.plan("w")) == [14]


def test_images_to_encode_leave_slots_to_texts():
    core, worker = scheduler()
    core.workers["w"].resources = [room := EncodingRoom(CAPACITY)]
    for name in ("one", "two"):
        core.add(arrival(item(0, name[0]), name=name))
    for name in ("three", "four"):
        core.add(arrival(name=name))
    planned = core.plan("w")
    assert planned is not None
    assert [row.request for row in planned.plan.admit] == ["one~1/0/0", "three~1/0/0"]
    assert core.sequences["two~1/0/0", 1].wait_reason is room.reason
    core.absorb("w", *worker.step(planned))
    encode(core, planned)
    assert "two~1/0/0" in [row.request for each in run(core, worker) for row in each.plan.admit]


async def test_pixels_are_held_once_and_within_the_limit(tmp_path: Path):
    mesh = Mesh(tmp_path, max_media_bytes=2 * NUM_BYTES)
    assert isinstance(mesh.ask(item(4, "a"), name="one"), Accepted)
    assert isinstance(mesh.ask(item(8, "a"), item(12, "b"), name="two"), Accepted)
    assert mesh.media._num_bytes == 2 * NUM_BYTES
    held = [each.spans[0].pixels for each in mesh.service._core.sequences.values()]
    assert held[0] is held[1]
    failed = mesh.ask(item(4, "c"), name="three")
    assert isinstance(failed, Failed)
    assert (failed.status, failed.code) == (503, "media_memory_full")
    assert failed.retry_after_s
    assert f"max-media-bytes = {2 * NUM_BYTES}" in failed.message
    del held
    failed = mesh.ask(*(item(4 * number, "cde"[number]) for number in range(3)), name="many")
    assert isinstance(failed, Failed)
    assert failed.status == 400, "it would never fit"
    mesh.service.on_message(mesh.tokenizer, Cancel([RequestKey("two~1/0/0", 1)]), [])
    await asyncio.sleep(0)
    assert mesh.media._num_bytes == NUM_BYTES
    assert isinstance(mesh.ask(item(4, "c"), name="three"), Accepted)

"""No message ends a service: a bad one ends its sender's connection or fails its own request."""

import itertools
import json
import random
import shutil
import typing
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness.engines import ENGINES, make_engine
from services.gateway.apis.mesh_state.endpoint import Reports
from services.gateway.http.json_reply import encode as encode_json
from shared.errors import CodecError
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE
from shared.wire.codec import decode, encode
from shared.wire.messages import (
    Arrived,
    Bye,
    Capacity,
    Inventory,
    Message,
    Refused,
    ServiceReport,
    Submit,
)
from tests.media.checkpoints import save_checkpoint
from tests.mesh.arena_parts import Arena
from tests.mesh.encoders_arena import EncodersArena
from tests.mesh.gateway_arena import GatewayArena, report
from tests.mesh.hostile import Odd, odd_versions, with_turned_bits
from tests.mesh.link_arena import LinkArena
from tests.mesh.moves_arena import MovesWorkerArena
from tests.mesh.ranks_arena import RanksArena
from tests.mesh.scheduler_arena import SchedulerArena
from tests.mesh.tokenizer_arena import MediaTokenizerArena, TokenizerArena
from tests.mesh.worker_arena import (
    MediaWorkerArena,
    PoolingWorkerArena,
    StatesWorkerArena,
    StoreWorkerArena,
    WindowsWorkerArena,
    WorkerArena,
)
from tests.pooling_models import save_embedder
from tests.services.worker.checkpoints import save_qwen2
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.speculation import engine_of

OWN_REPORT = report("gateway", "g", "tokenizer")
SHARE = 13  # prime to the numbers of values of an integer, a float, a text and a list
OF_SOCKETS = {Bye, Refused}  # see tests/shared/link/test_link.py


class ListingArena(GatewayArena):
    """Lists the services of a report too."""

    def show(self, report: ServiceReport) -> None:
        reports = Reports(lambda: OWN_REPORT, list)
        reports.receive(report)
        shown = json.loads(encode_json(reports._list(reports._answers(0))))
        assert "gateway" in {each["role"] for each in shown}


def worker(kernels: str) -> Callable[[Path], Arena]:
    def make(directory: Path) -> Arena:
        save_qwen2(directory)
        shutil.copy(EMBEDDED_MODEL / TOKENIZER_FILE, directory)
        return WorkerArena(make_engine(directory, kernels), is_fast=kernels == "native")

    return make


def pooling_worker(directory: Path) -> Arena:
    save_embedder(directory)
    return PoolingWorkerArena(make_engine(directory, "native"))


def windows_worker(directory: Path) -> Arena:
    save_family(directory, "GptOssForCausalLM")
    shutil.copy(EMBEDDED_MODEL / TOKENIZER_FILE, directory)
    return WindowsWorkerArena(make_engine(directory, "native"))


def states_worker(directory: Path) -> Arena:
    save_hybrid(directory, "qwen3.5")
    shutil.copy(EMBEDDED_MODEL / TOKENIZER_FILE, directory)
    return StatesWorkerArena(make_engine(directory, "native"))


def store_worker(directory: Path) -> Arena:
    save_hybrid(directory, "qwen3.5")
    shutil.copy(EMBEDDED_MODEL / TOKENIZER_FILE, directory)
    store = {"kv_offloading_size": 1 / 64, "kv_offloading_dir": directory / "kv"}
    store |= {"kv_disk_size": 1 / 64, "kv_disk_dir": directory / "disk"}
    return StoreWorkerArena(make_engine(directory, "native", **store))


def moves_worker(directory: Path) -> Arena:
    save_qwen2(directory)
    shutil.copy(EMBEDDED_MODEL / TOKENIZER_FILE, directory)
    return MovesWorkerArena(make_engine(directory, "native", kv_transfer=True))


def media_worker(directory: Path) -> Arena:
    save_checkpoint(directory)
    return MediaWorkerArena(make_engine(directory, "native"))


def media_tokenizer(directory: Path) -> Arena:
    save_checkpoint(directory / "model")
    return MediaTokenizerArena(directory, directory / "model")


ARENAS: dict[str, Callable[[Path], Arena]] = {
    "scheduler": SchedulerArena,
    "link of a scheduler": LinkArena,
    "link of a first rank": RanksArena,
    "encoder and worker": EncodersArena,
    "tokenizer": TokenizerArena,
    "tokenizer with images": media_tokenizer,
    "gateway": lambda directory: ListingArena(),
    "worker": worker("native"),
    "worker that pools": pooling_worker,
    "worker with windows": windows_worker,
    "worker with states": states_worker,
    "worker with images": media_worker,
    "worker with a store": store_worker,
    "worker with moves": moves_worker,
    "worker that drafts": lambda directory: WorkerArena(engine_of("native", "mtp", 3)),
    **{f"worker by {kernels}": worker(kernels) for kernels in ENGINES if kernels != "native"},
}

NAMES = [
    pytest.param(name, marks=pytest.mark.slow) if name.startswith("worker ") else name
    for name in ARENAS
]


@pytest.fixture(params=NAMES)
async def arena(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Arena]:
    arena = ARENAS[request.param](tmp_path)
    yield arena
    await arena.close()


async def test_a_right_message_is_let_through_and_one_with_two_faults_is_not(arena: Arena):
    for index, (message, arrays) in enumerate(arena.examples):
        assert await take(arena, index, frames_of(message, arrays)) == "let through", message
    for name, (index, message, arrays) in arena.lies.items():
        assert await take(arena, index, frames_of(message, arrays)) == "refused", name


async def test_every_part_of_every_message_is_in_an_example_and_holds_something(tmp_path: Path):
    """Empty values could not be made odd."""
    lacking = {kind: set(kind.__struct_fields__) for kind in parts_of(Message) - OF_SOCKETS}
    lacking[Submit].remove("reasoning_budget")  # the embedded model does not reason
    lacking[Capacity].remove("num_states")  # the example has windows, and no model has both
    lacking[Inventory] -= {"num_states", "state_bytes"}  # the example's worker has no states
    lacking[Arrived].remove("parts")  # of windows, which the example's model has not
    links = ("link of a scheduler", "link of a first rank", "encoder and worker")
    tokenizers = ("tokenizer", "tokenizer with images")
    parts = ("windows", "states", "images", "a store", "moves")
    workers = ("worker", "worker that pools", *(f"worker with {part}" for part in parts))
    for name in ("scheduler", *links, *tokenizers, "gateway", *workers):
        directory = tmp_path / name
        directory.mkdir()
        arena = ARENAS[name](directory)
        for message, _ in arena.examples:
            for part in structs_in(message):
                values = msgspec.structs.asdict(part)
                lacking[type(part)] -= {
                    name for name, value in values.items() if value not in (None, [])
                }
        await arena.close()
    assert not {kind.__name__: fields for kind, fields in lacking.items() if fields}


def parts_of(kind: Any) -> set[type[msgspec.Struct]]:
    """The structs inside a type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        inner = typing.get_type_hints(kind).values()
        return {kind}.union(*map(parts_of, inner))
    return set().union(*map(parts_of, typing.get_args(kind)))


def structs_in(value: Any) -> Iterator[msgspec.Struct]:
    if isinstance(value, msgspec.Struct):
        yield value
        value = [getattr(value, field) for field in value.__struct_fields__]
    if isinstance(value, list | tuple):
        for each in value:
            yield from structs_in(each)


async def take(arena: Arena, index: int, frames: list[bytes]) -> str:
    """The fate of a message."""
    try:
        decoded = decode(frames)
    except CodecError:
        return "not decoded"
    return "let through" if await arena.take(index, *decoded) else "refused"


def frames_of(message: Message, arrays: list[np.ndarray]) -> list[bytes]:
    return [bytes(frame) for frame in encode(message, arrays)]


async def survive(arena: Arena, index: int, odd: Odd) -> str:
    try:
        return await take(arena, index, odd.frames)
    except Exception as error:
        error.add_note(f"{index}: {odd.name}")
        raise


@pytest.mark.parametrize("share", [pytest.param(1, marks=pytest.mark.slow), SHARE])
async def test_every_field_at_its_odd_values_is_survived(arena: Arena, share: int):
    """Or at a share of them: other ones of each field of a kind."""
    numbers = itertools.count()
    for index, (message, arrays) in enumerate(arena.examples):
        for odd in odd_versions(message, arrays):
            if next(numbers) % share == 0:
                await survive(arena, index, odd)


async def test_turned_bits_are_survived(arena: Arena):
    await turn_bits(arena, 100)


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_many_turned_bits_are_survived(arena: Arena):
    """200,000 over all arenas, fewer if a step is slow: plans are checked alike."""
    is_slow = isinstance(arena, WorkerArena) and not arena.is_fast
    await turn_bits(arena, 15_000 if is_slow else 31_000)


async def turn_bits(arena: Arena, num: int) -> None:
    """One example after another, since a prepared arena takes the next of its kind sooner."""
    dice = random.Random(7)
    fates: Counter[str] = Counter()
    for index, example in enumerate(arena.examples):
        for _ in range(-(-num // len(arena.examples))):
            fates[await survive(arena, index, with_turned_bits(*example, dice))] += 1
    print(fates)
    assert fates["refused"]
    assert fates["let through"]

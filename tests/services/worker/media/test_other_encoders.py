"""Images that a worker gives to encoders, over real links in one process."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch

from services.worker.__main__ import service_of
from services.worker.media.encoder import Encoder, Job
from services.worker.media.encoder_service import EncoderService, Loaded
from services.worker.media.form import FeatureForm
from services.worker.media.other_encoders import AHEAD, OtherEncoders
from services.worker.step_thread import call_soon
from shared.errors import CodecError, ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    ENCODERS_MINOR,
    PROTOCOL_MAJOR,
    Encode,
    Features,
    Heartbeat,
    Hello,
    Item,
    State,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.worker.media.gates import Gate
from tests.services.worker.media.small_features import FAMILY, encode, form, job_of

WAIT_S = 60


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.005)


def config_of(folder: Path, name: str, **settings: Any) -> WorkerConfig:
    return WorkerConfig(mesh_dir=folder, instance=name, insecure_tcp=True, **settings)


class Service(EncoderService):
    """With a gate before its tower."""

    def __init__(self, config: WorkerConfig, layout: str) -> None:
        super().__init__(config)
        self.gate = Gate(encode)
        self._layout = layout

    def _load(self) -> Loaded:
        return Loaded(Encoder(self.gate, 1000, 1), FAMILY, form(self._layout))

    @property
    def address(self) -> str:
        assert self._link is not None
        return self._link.addresses[-1]


class Worker:
    def __init__(self, config: WorkerConfig) -> None:
        self.gate = Gate(encode)
        self.encoder = Encoder(self.gate, 1000, 1)
        self.told: list[tuple[str, int]] = []
        self.others = OtherEncoders(config, self.encoder, form())
        self.encoder.on_encoded = lambda name, _, num: self.told.append((name, num))
        self.encoder.on_wanted = partial(call_soon, asyncio.get_running_loop(), self.others.give)

    async def features(self, job: Job, number: int) -> list[list[float]]:
        found = await asyncio.to_thread(self.encoder.features, job, job.items[number])
        return found.tolist()


@asynccontextmanager
async def running(service: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(service.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def serving(folder: Path, layout: str = "layout", **settings: Any) -> AsyncIterator[Service]:
    name = settings.pop("name", "e")
    service = Service(config_of(folder, name, worker_role="encoder", **settings), layout)
    try:
        async with running(service):
            await until(lambda: service.status().state == State.READY)
            yield service
    finally:
        service.gate.open()  # once it can send no more


@asynccontextmanager
async def working(folder: Path, **settings: Any) -> AsyncIterator[Worker]:
    worker = Worker(config_of(folder, "w", **settings))
    async with running(worker.others):
        try:
            yield worker
        finally:
            worker.gate.open()


async def linked(worker: Worker) -> None:
    await until(lambda: worker.encoder._has_others)


def expected(number: int) -> list[list[float]]:
    return encode(np.full(6, number, np.uint8)).tolist()


async def test_an_encoder_computes_the_features_in_the_order_of_admission(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, working(tmp_path) as worker:
        await linked(worker)
        first, second = job_of("a", 1, 2, 3), job_of("b", 3, 4)
        worker.encoder.add(first)
        worker.encoder.add(second)
        await until(lambda: service.status().load == AHEAD)
        service.gate.open()
        await until(lambda: worker.told[-1:] == [("b", 6)])
        assert service.gate.rest == [1, 2, 3, 4]
        assert not worker.gate.rest
        assert await worker.features(second, 1) == expected(4)
        assert service.status().load == 0


async def test_features_are_packed_apart_from_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads, pack = [], FeatureForm.pack

    def noted(form: FeatureForm, features: torch.Tensor) -> Array:
        threads.append(get_ident())
        return pack(form, features)

    monkeypatch.setattr(FeatureForm, "pack", noted)
    async with serving(tmp_path) as service, working(tmp_path) as worker:
        service.gate.open()
        await linked(worker)
        worker.encoder.add(job := job_of("a", 1))
        assert await worker.features(job, 0) == expected(1)
    assert threads != [get_ident()]
    assert len(threads) == 1


async def test_a_step_waits_for_the_item_that_it_needs(tmp_path: Path) -> None:
    async with serving(tmp_path) as service, working(tmp_path) as worker:
        await linked(worker)
        job = job_of("a", 1, 2, 3, 4)
        worker.encoder.add(job)
        await until(lambda: service.status().load == AHEAD)
        waiting = asyncio.create_task(worker.features(job, 3))
        await until(lambda: worker.encoder._urgent is not None)
        service.gate.open()
        assert await waiting == expected(4)
        await until(lambda: worker.told[-1:] == [("a", 12)])
        assert service.gate.rest == [1, 2, 4, 3]


async def test_items_of_a_lost_encoder_are_encoded_here(tmp_path: Path) -> None:
    async with working(tmp_path) as worker:
        async with serving(tmp_path):
            await linked(worker)
            job = job_of("a", 1, 2, 3)
            worker.encoder.add(job)
            await until(lambda: worker.others.status().load == AHEAD)
            waiting = asyncio.create_task(worker.features(job, 0))
        worker.gate.open()
        assert await waiting == expected(1)
        await until(lambda: worker.told[-1:] == [("a", 9)])
        assert sorted(worker.gate.rest) == [1, 2, 3]


async def test_encoders_share_the_items_and_one_may_leave(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as one,
        serving(tmp_path, name="f") as other,
        working(tmp_path) as worker,
    ):
        await until(lambda: len(worker.others._ready()) == 2)
        worker.encoder.add(job_of("a", 1, 2, 3, 4))
        await until(lambda: one.status().load == other.status().load == AHEAD)
        leaving = asyncio.create_task(one.drain())
        await until(lambda: len(worker.others._ready()) == 1)
        worker.encoder.add(job_of("b", 5, 6))
        one.gate.open()
        await leaving
        assert len(one.gate.rest) == AHEAD
        other.gate.open()
        await until(lambda: worker.told[-1:] == [("b", 6)])
        assert len(other.gate.rest) == 4
        assert not worker.gate.rest


async def test_an_encoder_elsewhere_is_found_by_its_address(tmp_path: Path) -> None:
    async with serving(tmp_path, kv_transfer_address="tcp://127.0.0.1:0") as service:
        service.gate.open()
        elsewhere = tmp_path / "elsewhere"
        async with working(elsewhere, encoder_address=[service.address]) as worker:
            await linked(worker)
            worker.encoder.add(job := job_of("a", 1))
            assert await worker.features(job, 0) == expected(1)
            assert not worker.gate.rest


async def test_one_with_other_features_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, layout="other"), working(tmp_path) as worker:
        await until(lambda: "its features differ" in caplog.text)
        assert not worker.encoder._has_others


@pytest.mark.parametrize("minor", [ENCODERS_MINOR - 1, ENCODERS_MINOR])
async def test_one_of_an_older_minor_is_refused(tmp_path: Path, minor: int) -> None:
    hello = Hello(PROTOCOL_MAJOR, minor, "worker", "e", layout="layout")
    async with working(tmp_path) as worker, serving(tmp_path, name="f") as service:
        for each in (worker.others, service):
            assert bool(each.refusal(hello)) == (minor < ENCODERS_MINOR)


class Fake:
    """An encoder that answers as it likes."""

    def __init__(self, worker: Worker) -> None:
        hello = Hello(PROTOCOL_MAJOR, ENCODERS_MINOR, "worker", "e", layout="layout")
        self.peer: Any = FakePeer(hello)
        self._others = worker.others
        worker.others.on_up(self.peer)
        self.peer.status = Heartbeat(State.READY, "", 0, 0)
        self.peer.on_state()

    def say(self, number: int, checksum: int, num_bytes: int) -> None:
        message = Features(bytes([number]) * 16, checksum)
        self._others.on_message(self.peer, message, [np.zeros(num_bytes, np.uint8)])


@pytest.mark.parametrize(
    ("number", "num_bytes", "why"),
    [(2, 24, "an item that it was not given"), (1, 23, "features of 23 bytes; the item has 24")],
)
async def test_hostile_features(tmp_path: Path, number: int, num_bytes: int, why: str) -> None:
    async with working(tmp_path) as worker:
        fake = Fake(worker)
        worker.encoder.add(job_of("a", 1))
        worker.others.give()
        with pytest.raises(CodecError, match=why):
            fake.say(number, 0, num_bytes)


async def test_damaged_features_end_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with working(tmp_path) as worker:
        fake = Fake(worker)
        monkeypatch.setattr(worker.others._link, "drop", worker.others.on_down)
        worker.gate.open()
        worker.encoder.add(job := job_of("a", 1))
        worker.others.give()
        fake.say(1, 1, 24)
        assert await worker.features(job, 0) == expected(1)
        assert worker.gate.rest == [1]


@pytest.mark.parametrize(
    ("change", "num_bytes", "why"),
    [
        ({"num_tokens": 3}, 6, "an item of 3 tokens with 6 bytes"),
        ({}, 5, "an item of 2 tokens with 5 bytes"),
        ({"size": (3, 1, 2)}, 18, "an item of 2 tokens with 18 bytes"),
    ],
)
async def test_hostile_items(
    tmp_path: Path, change: dict[str, Any], num_bytes: int, why: str
) -> None:
    fields: dict[str, Any] = {"start": 0, "num_tokens": 2, "size": (1, 1, 2), "digest": bytes(16)}
    peer: Any = FakePeer(Hello(PROTOCOL_MAJOR, ENCODERS_MINOR, "worker", "w", layout="layout"))
    async with serving(tmp_path) as service:
        message = Encode(Item(**fields | change))
        with pytest.raises(CodecError, match=why):
            service.on_message(peer, message, [np.zeros(num_bytes, np.uint8)])
        for _ in range(AHEAD):
            service.on_message(peer, Encode(Item(**fields)), [np.zeros(6, np.uint8)])
        with pytest.raises(CodecError, match=f"more than {AHEAD} items"):
            service.on_message(peer, Encode(Item(**fields)), [np.zeros(6, np.uint8)])
        service.on_down(peer, "gone")
        assert service.status().load == 0


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"language_model_only": True}, "language-model-only leaves nothing to encode"),
        ({"tensor_parallel_size": 2}, "tensor-parallel-size 2: 1 is the limit"),
    ],
)
def test_settings_without_an_encoder_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=f"worker-role: encoder: {why}"):
        service_of(WorkerConfig(worker_role="encoder", **settings))


async def test_a_model_of_texts_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    service = EncoderService(config_of(tmp_path, "e", model=checkpoint, worker_role="encoder"))
    with pytest.raises(ConfigError, match=r"worker-role: encoder: .* is a model of texts alone"):
        await service.run()


@pytest.mark.parametrize("folder", ["qwen2.5-vl", "qwen3-vl"], indirect=True)
async def test_features_keep_their_bits(folder: Path, tmp_path: Path) -> None:
    """Of an encoder with its own tower; it plans no memory for a KV cache."""
    service = EncoderService(config_of(tmp_path, "e", model=folder, dtype="float32"))
    loaded = service._load()
    size = loaded.family.fit(56, 84, loaded.family.limits).size
    pixels = np.random.default_rng(1).integers(0, 256, (*size, 3), np.uint8)
    features = loaded.encoder._encode(pixels)
    num = loaded.family.num_tokens(size)
    item = Item(start=0, num_tokens=num, size=size, digest=bytes(16))
    content = loaded.form.pack(features)
    assert content.nbytes == loaded.form.num_bytes(item)
    assert torch.equal(loaded.form.unpack(content, item), features)

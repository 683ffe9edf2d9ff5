"""An encoder and a worker that gives it images, by themselves: their connections, items and
features."""

import asyncio
import zlib
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from services.worker.media.encoder import Encoder
from services.worker.media.encoder_service import EncoderService, Loaded
from services.worker.media.features import FeatureCache
from services.worker.media.other_encoders import SERVICE, OtherEncoders
from shared.errors import CodecError
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    ENCODERS_MINOR,
    PROTOCOL_MAJOR,
    Encode,
    Features,
    Hello,
    Item,
    Message,
)
from tests.mesh.arena_parts import Example, FakePeer, Lies
from tests.services.worker.media.small_features import FAMILY, encode, form, job_of

MAX_BYTES = 1000


class EncodersArena:
    """An encoder connects; it gets an item, and the worker its features."""

    def __init__(self, directory: Path) -> None:
        config = WorkerConfig(mesh_dir=directory, instance="w", worker_role="encoder")
        self._service = EncoderService(config)
        self._service._loaded = Loaded(Encoder(encode, MAX_BYTES, 1), FAMILY, form())
        self._encoder = Encoder(encode, MAX_BYTES, 1)
        self._others = OtherEncoders(config, self._encoder, form())
        self._others._link.drop = self._drop  # type: ignore[method-assign]
        job = job_of("a", 1)
        (item,) = job.items
        item = replace(item, start=1, time=1)
        pixels, content = job.pixels[item.digest], form().pack(encode(job.pixels[item.digest]))
        self._hello = Hello(PROTOCOL_MAJOR, ENCODERS_MINOR, SERVICE, "e", layout=form().layout)
        found = Features(item.digest, zlib.crc32(content.data))
        self.examples: list[Example] = [
            (self._hello, []),
            (Encode(item), [pixels]),
            (found, [content]),
        ]
        self.lies: Lies = {
            "other features": (0, replace(self._hello, layout="other", minor=99), []),
            "an item of another size": (1, Encode(replace(item, num_tokens=3)), [pixels]),
            "features of another item": (2, replace(found, digest=bytes(16)), [content]),
            "fewer features": (2, found, [content[1:]]),
            "features with another sum": (2, replace(found, checksum=1), [content]),
        }

    async def close(self) -> None:
        await self._others._link.close("the end")

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        if index == 0:
            return self._others._link.refusal(message, SERVICE) is None
        peer = FakePeer(self._hello)
        try:
            if index == 1:
                return self._encode(peer, message, arrays)
            return await self._receive(peer, message, arrays)
        except CodecError:
            return False

    def _encode(self, peer: FakePeer, message: Message, arrays: list[Array]) -> bool:
        self._service.on_message(peer, message, arrays)
        self._service.on_down(peer, "the end")
        assert not self._service._jobs
        return True

    async def _receive(self, peer: FakePeer, message: Message, arrays: list[Array]) -> bool:
        while self._encoder._under_way:  # an item of the last peer
            await asyncio.sleep(0)
        self._encoder._features = FeatureCache(MAX_BYTES)
        job = job_of("a", 1)
        (item,) = job.items
        taken: list[Item] = []
        add = Encoder.add_features

        def note(item: Item, features: Tensor) -> None:
            taken.append(item)
            add(self._encoder, item, features)

        self._encoder.add_features = note  # type: ignore[method-assign]
        self._others.on_up(peer)
        self._encoder.use_others(True)
        self._encoder.add(job)
        self._others.give()
        assert peer.take(Encode)
        try:
            self._others.on_message(peer, message, arrays)
            while self._others._given.get(peer):
                await asyncio.sleep(0)
        finally:
            self._encoder.drop(job)
            self._drop(peer)
        return item in taken  # a lost peer's item is encoded here

    def _drop(self, peer: Any, reason: str = "") -> None:
        if peer in self._others._given:
            self._others.on_down(peer, reason)

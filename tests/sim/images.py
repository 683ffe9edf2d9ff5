"""Images of the simulator: a pixel is a token, files are read and encoded in virtual time."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch
from zlib import crc32

import msgspec
import numpy as np
import torch

from services.gateway.mesh.job import Attachment, Prompt
from services.tokenizer.media.pixel_cache import PixelCache
from services.tokenizer.media.reader_messages import Answer
from services.tokenizer.media.readers import ChooseTargets, Pixels, Readers
from services.tokenizer.media.reading import MediaReading
from services.worker.media import encoder
from services.worker.media.addition import Media
from services.worker.media.encoder import Encoder
from services.worker.media.encoder_service import EncoderService, Loaded
from services.worker.media.form import FeatureForm
from services.worker.media.item_check import uncached_items
from services.worker.media.table import MediaTable
from services.worker.media.tower_plan import TowerPlan
from shared.media.family import PixelLimits, digest_of, limits_of
from shared.media.qwen2_5_vl import SquaresOfPatches
from shared.wire.codec import Array
from shared.wire.envelope import read_options
from shared.wire.messages import MEDIA_MINOR, Hello, Item, Medium, MediumKind, StepPlan
from tests.sim.virtual_loop import VirtualThread

PLACEHOLDER, TEXT = 0, "<|endoftext|>"
CHAT_TEMPLATE = Path(__file__).parent / "chat.jinja"
MOST_TOKENS = 40  # of an image
FAMILY = SquaresOfPatches(PLACEHOLDER, 1, 1, PixelLimits(4, MOST_TOKENS))
FORM = FeatureForm(FAMILY, "layout", 3, torch.uint8, torch.device("cpu"))
SIZES = [(2, 2), (5, 3), (20, 2), (9, 9), (4, 4), (1, 17)]
"""Widths and heights; one is scaled down."""
MOST_SLOTS = 8
CACHE_BYTES = 150
"""Of pixels in a tokenizer, and of features in a worker: some images are kept, not all."""


def file_of(number: int) -> Array:
    """One of ``SIZES``; its width, its height, and its content."""
    return np.array([*SIZES[number], 7 * number], np.uint8)


def illustrated(random: Random, prompt: Prompt) -> Prompt:
    """A chat with up to three images in its first message."""
    text = bytes(prompt.data).decode() if prompt.kind == "text" else "Which fish is it?"
    numbers = random.choices(range(len(SIZES)), k=random.randint(1, 3))
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    for place in range(len(numbers)):
        content.insert(random.randint(0, len(content)), {"type": "image", "media": place})
    chat = np.frombuffer(msgspec.json.encode([{"role": "user", "content": content}]), np.uint8)
    media = [Attachment(Medium(param="messages"), file_of(number)) for number in numbers]
    return Prompt("chat", chat, media)


class SimulatedReaders(Readers):
    """Each reads a file in the time of a call on a thread."""

    async def read(
        self, file: Array, owner: str, choose: ChooseTargets, kind: MediumKind = "image"
    ) -> Pixels | None:
        targets = choose(Answer(int(file[0]), int(file[1])))
        await asyncio.to_thread(lambda: None)
        if targets is None:
            return None
        width, height = targets.upright
        return Pixels(width, height, np.resize(file, width * height * 3))


def reading(max_model_len: int) -> MediaReading:
    """Of one tokenizer."""
    readers, cache = SimulatedReaders(1, 1 << 20), PixelCache(CACHE_BYTES)
    common = max_model_len, limits_of(FAMILY), 1 << 20, readers, cache
    return MediaReading(FAMILY, {"image": TEXT}, *common, lambda text: np.zeros(0, np.int32))


class _Thread(VirtualThread):
    """The encoder's, which sets nothing of a real one."""

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        if call is not encoder._begin_thread:
            return super().submit(call, *args)
        done: Future[Any] = Future()
        done.set_result(None)
        return done


class _Encoder(Encoder):
    """Encodes an item a call, so that each takes its time. It checks the features of others."""

    def __init__(self) -> None:
        with patch.object(encoder, "ThreadPoolExecutor", _Thread):
            super().__init__(_features, CACHE_BYTES, 1)
        self._given: dict[bytes, np.ndarray] = {}

    def give_away(self) -> tuple[Item, np.ndarray] | None:
        found = super().give_away()
        if found is not None:
            self._given[found[0].digest] = found[1]
        return found

    def add_features(self, item: Item, features: torch.Tensor) -> None:
        pixels = self._given.pop(item.digest)
        assert features.flatten().tolist() == pixels.tolist(), "the features of another image"
        super().add_features(item, features)

    def _run(self) -> None:
        found = self._next()
        if found is not None:
            self._add(found[0], self._timed(*found))
            self._thread.submit(self._run)


def _features(pixels: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(pixels.reshape(-1).copy())


class SimulatedPlan(TowerPlan):
    def __init__(self) -> None:
        """Without a tower."""

    @property
    def form(self) -> FeatureForm:
        return FORM


class SimulatedEncoders(EncoderService):
    """A worker that encodes images for others."""

    def _load(self) -> Loaded:
        return Loaded(_Encoder(), FAMILY, FORM)

    def held(self) -> dict[str, int]:
        return {} if self._loaded is None else held_by_encoder(self._loaded.encoder)


def held_by_encoder(encoder: Encoder) -> dict[str, int]:
    return {"images to encode": len(encoder._jobs), "pins": len(encoder._features._pins)}


class SimulatedMedia(Media):
    """The images of a simulated worker, which sees their digests. It checks pixels by them."""

    def __init__(self) -> None:
        self.family = FAMILY
        self.encoder = _Encoder()
        self._plan = SimulatedPlan()
        nothing: Any = None
        parts = FAMILY, nothing, self.encoder, nothing, nothing
        self.table = MediaTable(*parts, num_slots=MOST_SLOTS)

    def seen(self, plan: StepPlan, ids: np.ndarray, pixels: Sequence[Array]) -> np.ndarray:
        """``ids`` of the plan; in place of placeholders they are negative, as no token is."""
        self._check(plan, pixels)
        self.table.apply(plan, pixels)
        seen, start = ids.copy(), 0
        for row in plan.admit:
            for item in row.items:
                place = slice(start + item.start, start + item.end)
                assert (ids[place] == PLACEHOLDER).all(), "an item stands for other ids"
                seen[place] = _seen(item)
            start += row.num_ids
        return seen

    def note_computed(self, slot: int, num_ids: int) -> None:
        prompt = self.table._prompts.get(slot)
        if prompt is not None:
            self.encoder.note_computed(prompt.job, num_ids)

    def check_whole(self, plan: StepPlan, num_computed: Mapping[int, int]) -> None:
        """After a step that had to compute all of an item, or nothing."""
        for slot in (row.slot for row in plan.prefill):
            prompt, end = self.table._prompts.get(slot), num_computed[slot]
            for item in () if prompt is None else prompt.job.items:
                assert not item.start < end < item.end, "a step computed a part of an item"

    def held(self) -> dict[str, int]:
        return held_by_encoder(self.encoder)

    def _check(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        found = dict(zip(uncached_items(plan), pixels, strict=True))
        for row in plan.admit:
            salt = read_options(row.options).salt
            for item in row.items:
                if item.digest in found:
                    data = found[item.digest].data
                    digest = digest_of("image", item.size, data, salt)
                    assert digest == item.digest, "the pixels of another image"


def _seen(item: Item) -> np.ndarray:
    numbers = crc32(item.digest) + np.arange(item.num_tokens)
    return (-1 - numbers % 2**30).astype(np.int32)


def without_images(hello: Hello, minor: int) -> Hello:
    """As a service of an older ``minor`` says it."""
    capacity = hello.capacity
    if minor < MEDIA_MINOR and capacity is not None:
        capacity = msgspec.structs.replace(capacity, media=(), whole_media=())
        hello = msgspec.structs.replace(hello, capacity=capacity)
    return msgspec.structs.replace(hello, minor=minor)

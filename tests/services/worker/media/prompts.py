"""Chats with pictures: their texts by transformers, and jobs for an engine."""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from PIL import Image

from services.scheduler.media.cell import WholeItem
from services.worker.engine.protocol import StepOutput
from services.worker.media.item_check import uncached_items
from shared.media.families import read_family
from shared.media.family import digest_of, placeholders_of
from shared.wire.codec import Array
from shared.wire.messages import Admit, Item, MediumKind, RunKind, SamplingParams, StepPlan
from tests.media.families import FAMILIES
from tests.media.references import Clip, Expected, Reference
from tests.services.worker.driver import Driver, Job

NUM_TOKENS = 12
# Of a product of parameters, `make test` runs most cases with the first value: the fastest.
KERNELS = ("native", "torch", "device")
ON_HOSTS = ("native", "torch", pytest.param("device", marks=pytest.mark.slow))
WITH_EXPERTS = ("qwen3-vl-moe", "ernie4.5-vl")

each_family = pytest.mark.parametrize(
    "folder",
    [
        pytest.param(name, marks=pytest.mark.slow if name in WITH_EXPERTS else ())
        for name in FAMILIES
    ],
    indirect=True,
    scope="session",
)
GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=NUM_TOKENS)


@dataclass
class Chat:
    """A prompt with items, and its text by transformers. Pictures have sides that
    are not resized."""

    expected: Expected
    items: list[Item]
    pixels: dict[bytes, np.ndarray]  # by digest

    def job(self, params: SamplingParams = GREEDY) -> "MediaJob":
        ids = [*self.expected.prompt_ids]
        return MediaJob(ids, params, items=self.items, pixels=self.pixels)


@dataclass
class MediaJob(Job):
    items: list[Item] = field(default_factory=list)
    pixels: dict[bytes, np.ndarray] = field(default_factory=dict)


def chat(oracle: Reference, *parts: str | Image.Image | Clip) -> Chat:
    content = [
        {"type": "text", "text": part} if isinstance(part, str) else {"type": _kind(part)}
        for part in parts
    ]
    pictures = [part for part in parts if isinstance(part, Image.Image)]
    clips = [part for part in parts if isinstance(part, Clip)]
    expected = oracle.expect([{"role": "user", "content": content}], pictures, NUM_TOKENS, clips)
    family = read_family(Path(oracle.model.config._name_or_path))
    assert family is not None
    placeholders, group = placeholders_of(family), family.videos.group if family.videos else 1
    ids, end = np.array(expected.prompt_ids), 0
    items, pixels = [], {}
    for part in parts:
        if isinstance(part, str):
            continue
        kind = _kind(part)
        for frames, time in _groups(oracle, part, group):
            size = len(frames), frames[0].height, frames[0].width
            buffer = b"".join(frame.tobytes() for frame in frames)
            digest = digest_of(kind, size, memoryview(buffer), "", time)
            num = family.num_tokens(size)
            own = np.full(num, placeholders[kind]) if kind == "video" else family.ids(size)
            first, inner = (int((each == placeholders[kind]).argmax()) for each in (ids[end:], own))
            start = end + first - inner
            end = start + num
            np.testing.assert_array_equal(ids[start:end], own)
            items.append(
                Item(kind=kind, start=start, num_tokens=num, size=size, digest=digest, time=time)
            )
            pixels[digest] = np.frombuffer(buffer, np.uint8)
    assert not np.isin(ids[end:], [*placeholders.values()]).any()
    return Chat(expected, items, pixels)


def _kind(part: Image.Image | Clip) -> MediumKind:
    return "video" if isinstance(part, Clip) else "image"


def _groups(
    oracle: Reference, part: Image.Image | Clip, group: int
) -> list[tuple[Sequence[Image.Image], int]]:
    """Frames of an item, and their time."""
    if isinstance(part, Image.Image):
        return [(frames, 0) for frames in oracle.items(part)]
    config, frames = oracle.model.config, part.frames
    interval = getattr(config.vision_config, "tokens_per_second", 0) * part.seconds
    if config.model_type == "ernie4_5_vl_moe":
        interval = 1
    return [
        (frames[start : start + group], int(start // group * interval))
        for start in range(0, len(frames), group)
    ]


class Wrapped:
    """An engine that gets plans with pixels, and with ``depth`` drafts of each row."""

    def __init__(self, engine: Any, depth: int = 0) -> None:
        self.engine, self.capacity = engine, engine.capacity
        self.depth = depth
        self.num_accepted = 0
        self.pixels: dict[bytes, np.ndarray] = {}

    def submit(
        self, plan: StepPlan, ids: np.ndarray, output: Future[StepOutput], _: Sequence[Array] = ()
    ) -> None:
        pixels = [self.pixels[digest] for digest in uncached_items(plan)]
        if self.depth:
            decode = [replace(row, verify_depth=self.depth) for row in plan.decode]
            plan = replace(plan, decode=decode, draft_depth=self.depth)
        output.add_done_callback(self._count)
        self.engine.submit(plan, ids, output, pixels)

    def _count(self, output: Future[StepOutput]) -> None:
        rows = output.result()[0].rows
        runs = [row.run for row in rows if row.run.kind == RunKind.OUTPUT]
        self.num_accepted += sum(run.num_accepted for run in runs)


class MediaDriver(Driver):
    """The first ``num_cached`` ids have their KV in the blocks of the run before, which had equal
    jobs. Chunks are cut as the scheduler cuts them."""

    def __init__(
        self,
        engine: Any,
        chunk_sizes: Sequence[int] = (1000,),
        num_steps: int = 1,
        depth: int = 0,
        num_cached: int = 0,
    ) -> None:
        wrapped: Any = Wrapped(engine, depth)
        super().__init__(wrapped, chunk_sizes, num_steps=num_steps)
        self.num_cached = num_cached

    @property
    def wrapped(self) -> Wrapped:
        found: Any = self.engine
        assert isinstance(found, Wrapped)
        return found

    def _tables(self, num: int) -> list[list[list[int]]]:
        capacity = self.engine.capacity
        shape = num, len(capacity.groups), -(-capacity.max_model_len // capacity.block_size)
        return np.arange(np.prod(shape)).reshape(shape).tolist()

    def _chunk(self, job: Job, num_lacking: int) -> int:
        first = len(job.prompt) - num_lacking
        end = first + super()._chunk(job, num_lacking)
        assert isinstance(job, MediaJob)
        for item in job.items:
            if item.kind in self.engine.capacity.whole_media:
                end = WholeItem(item.start, item.end)(first, end, len(job.prompt))
        return end - first

    def _admit(self, slot: int, job: Job, tables: list[list[int]]) -> Admit:
        row = super()._admit(slot, job, tables)
        assert isinstance(job, MediaJob)
        self.wrapped.pixels |= job.pixels
        return replace(row, items=job.items, num_cached=self.num_cached)

    def _step(
        self, jobs: dict[int, Job], lacking: dict[int, int], admits: list[Admit], ids: np.ndarray
    ) -> None:
        for row in admits:
            lacking[row.slot] -= row.num_cached
        super()._step(jobs, lacking, admits, ids)


def texts_of(engine: Any, chats: Sequence[Chat], **options: Any) -> list[list[int]]:
    return MediaDriver(engine, **options).run([each.job() for each in chats])

"""A scheduler by itself: requests go in above, a simulated worker computes the plans below."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from services.scheduler.block_pool import BlockHashes
from services.scheduler.scheduler import Planned
from services.scheduler.service import SchedulerService
from services.worker.plan_check import PlanCheck
from shared.errors import CodecError
from shared.settings.scheduler import SchedulerConfig
from shared.wire.codec import Array
from shared.wire.envelope import RequestOptions, hash_root
from shared.wire.messages import (
    Accepted,
    Adapters,
    Arrived,
    Cancel,
    Capacity,
    Copied,
    Credit,
    Encoded,
    Failed,
    Fetched,
    Finished,
    Generate,
    Grant,
    Inbox,
    Inventory,
    Item,
    LoadAdapter,
    Message,
    ModelInfo,
    NewSequence,
    Part,
    RequestKey,
    ResultRow,
    RunKind,
    SamplingParams,
    Settled,
    SpanReport,
    Spilled,
    StepPlan,
    StepResult,
    TokenRun,
    Tokens,
    UnloadAdapter,
)
from tests.mesh.arena_parts import (
    ADAPTER,
    LONG_ROW,
    NO_ARRAYS,
    NO_IDS,
    NO_ROW,
    NO_TIME_ROW,
    PARAMS,
    PLAIN,
    PROMPT,
    REFUSED,
    SALTED,
    SPANS,
    TRACED,
    Example,
    FakePeer,
    Lies,
    connect,
)
from tests.services.scheduler.simulated_worker import SimulatedWorker, next_token

OTHER_SEQUENCE = "other~1/0/0"
OTHER = Generate("other~1/0", 1, PLAIN, [NewSequence(OTHER_SEQUENCE)])
ITEM = Item(start=1, num_tokens=1, size=(1, 2, 2), digest=bytes(range(16)))
LATE_ITEM = msgspec.structs.replace(ITEM, start=len(PROMPT))
PIXELS = np.arange(12, dtype=np.uint8)
STORED = np.arange(100, 112, dtype=np.int32)
INVENTORY = Inventory("store", "location", 4, 100)
INBOX = Inbox("layout", "location", 2, 100, "tcp://127.0.0.1:1", "decode", 1, "s")
OF_COPIES = Copied | Fetched | Spilled
OF_WORKER = StepResult | Adapters | Encoded | Inventory | OF_COPIES | Inbox | Arrived | Settled
DISK = msgspec.structs.replace(INVENTORY, store="below", location="disk", is_on_disk=True)
EMPTY: list[np.ndarray] = [np.zeros(0, np.uint8), NO_IDS]


def _keys_of(prompt: np.ndarray, num: int) -> list[bytes]:
    """The keys of its first blocks."""
    hashes = BlockHashes(4, hash_root(RequestOptions()))

    def content(start: int, end: int) -> bytes:
        return prompt[start:end].tobytes()

    return [hashes.block_hash(number, content) for number in range(num)]


@dataclass
class _Ends:
    """A scheduler's peers; nothing bad comes from the tokenizer ``beside``."""

    tokenizer: FakePeer
    beside: FakePeer
    worker: FakePeer
    simulated: SimulatedWorker


class SchedulerArena:
    """Requests go in above, a simulated worker that checks every plan computes them below."""

    model = ModelInfo(["m"], "f", 1000, 64, 1)
    capacity = Capacity(32, 4, 4, 16, 64, 1000, media=("image",))

    def __init__(self, directory: Path) -> None:
        self._service = SchedulerService(SchedulerConfig(mesh_dir=directory, instance="s"))
        self.generate = Generate("r~1/0", 1, PARAMS, [NewSequence("r~1/0/0")], options=TRACED)
        self.with_image = Generate(
            "i~1/0", 1, PLAIN, [NewSequence("i~1/0/0")], options=SALTED, items=[ITEM]
        )
        two = [NewSequence("q~1/0/0", 0, 2), NewSequence("q~1/0/1", 1, 1, 1)]
        emitted = np.array([5, 6, 7], np.int32)
        key = RequestKey("r~1/0/0", 1)
        row = ResultRow(0, "r~1/0/0", 1, TokenRun(1, 3, 2), "stop")
        broken = ResultRow(0, "r~1/0/0", 1, TokenRun(0), None, "it breaks", "broken")
        prompt_row = ResultRow(0, "r~1/0/0", 1, TokenRun(3, 2, 1, kind=RunKind.PROMPT))
        rows = [prompt_row, row]
        stored, fresh = _keys_of(STORED, 2), _keys_of(PROMPT, 1)
        keys = np.frombuffer(b"".join(stored), np.uint8)
        places = np.array([3, 0], np.int32)
        self.inventory: list[np.ndarray] = [keys, places]
        copied = Copied(2, stored[:1], fresh, is_down=True, load_s=0.1)
        with_stored = msgspec.structs.replace(copied, unsaved=stored)
        reports = [SpanReport("r~1/0/0", 1, "worker", "w", SPANS)]
        values = np.zeros(3 * 2 + 3, np.float32)
        ids, top_ids, ranks = (
            np.full(4, 7, np.int32),
            np.ones(3 + 2, np.int32),
            np.ones(4, np.int32),
        )
        self.examples: list[Example] = [
            (self.generate, [PROMPT, NO_IDS]),
            (Generate("q~1/0", 1, PLAIN, two, options=SALTED), [PROMPT, emitted]),
            (self.with_image, [PROMPT, NO_IDS, PIXELS]),
            (Cancel([key]), []),
            (Credit([Grant("r~1/0/0", 1, 300, 1 << 22)]), []),
            (StepResult(1, rows, 0.1, 0.1, reports), [ids, values, top_ids, ranks]),
            (StepResult(1, [broken]), NO_ARRAYS),
            (Adapters([ADAPTER, REFUSED]), []),
            (LoadAdapter("l1", "sql", "sql"), []),
            (UnloadAdapter("sql", "u1"), []),
            (Encoded("r~1/0/0", 1, 2), []),
            (INVENTORY, self.inventory),
            (copied, []),
            (INBOX, []),
            (Arrived(stored), []),
            (Arrived(fresh, True), []),
            (Settled(stored), []),
            (DISK, self.inventory),
            (Fetched(2, stored[:1], fetch_s=0.1), []),
            (Spilled(2, stored[:1], is_down=True), []),
        ]
        many, one = np.full(5000, 7, np.int32), np.full(2, 7, np.int32)
        plain = ResultRow(0, "r~1/0/0", 1, TokenRun(1))
        drafts = ResultRow(0, "r~1/0/0", 1, TokenRun(2, 1, kind=RunKind.DRAFTS))
        draft_arrays = [one, one.astype(np.float32), NO_IDS, one]
        self.lies: Lies = {
            "places of no store": (11, INVENTORY, [keys, np.array([3, 4], np.int32)]),
            "a place twice": (11, INVENTORY, [keys, np.array([3, 3], np.int32)]),
            "a key twice": (11, INVENTORY, [np.tile(keys[:16], 2), places]),
            "a place without a key": (11, INVENTORY, [keys[:16], places]),
            "an Inventory again": (12, INVENTORY, self.inventory),
            "copies of no plan": (12, msgspec.structs.replace(copied, step=1), []),
            "saves of another plan": (12, with_stored, []),
            "an Inbox again": (14, INBOX, []),
            "places of another size on a disk": (
                17,
                msgspec.structs.replace(DISK, place_bytes=99),
                self.inventory,
            ),
            "fetches of no plan": (18, Fetched(1), []),
            "fetches of another plan": (18, Fetched(2, fresh), []),
            "spills of no plan": (19, Spilled(1), []),
            "spills of another plan": (19, Spilled(2, fresh), []),
            "an Inbox for another cell": (13, msgspec.structs.replace(INBOX, cell="t"), []),
            "more guests than an inbox has places": (14, Arrived(stored, True), []),
            "more blocks than an inbox has places": (14, Arrived([*stored, *fresh]), []),
            "a part of a keep point that the model has not": (
                14,
                Arrived(fresh, parts=[Part(fresh[0], 4, 0, 1)]),
                [],
            ),
            "parts of other keys": (14, Arrived(fresh, parts=2 * [Part(fresh[0], 4, 0, 1)]), []),
            "pieces of states without states": (
                13,
                msgspec.structs.replace(INBOX, num_pieces=2),
                [],
            ),
            "blocks without an Inbox": (13, Arrived(stored), []),
            "two rows for a slot": (5, StepResult(1, [plain, plain]), [one, *NO_ARRAYS[1:]]),
            "more steps than the plan asked for": (
                5,
                StepResult(1, [plain], num_steps=2),
                [one[:1], *NO_ARRAYS[1:]],
            ),
            "5000 tokens": (
                5,
                StepResult(1, [ResultRow(0, "r~1/0/0", 1, TokenRun(5000))]),
                [many, *NO_ARRAYS[1:]],
            ),
            "tokens before and after the end": (
                5,
                StepResult(1, [ResultRow(0, "r~1/0/0", 1, TokenRun(1), "stop"), plain]),
                [one, *NO_ARRAYS[1:]],
            ),
            "an end without a token": (
                5,
                StepResult(1, [ResultRow(0, "r~1/0/0", 1, TokenRun(0), "stop")]),
                NO_ARRAYS,
            ),
            "drafts without tokens": (5, StepResult(1, [drafts]), draft_arrays),
            "3000 emitted ids": (
                0,
                Generate("r~1/0", 1, PARAMS, [NewSequence("r~1/0/0", 0, 3000)]),
                [PROMPT, np.full(3000, 7, np.int32)],
            ),
            "more emitted ids than the sequence counts": (0, self.generate, [PROMPT, one]),
            "fewer emitted ids than the sequence counts": (
                0,
                Generate("r~1/0", 1, PARAMS, [NewSequence("r~1/0/0", 0, 3)]),
                [PROMPT, one],
            ),
            "a sequence twice": (
                0,
                Generate("r~1/0", 1, PARAMS, 2 * [NewSequence("r~1/0/0")]),
                [PROMPT, NO_IDS],
            ),
            "an image beyond the prompt": (
                0,
                msgspec.structs.replace(self.generate, items=[LATE_ITEM]),
                [PROMPT, NO_IDS, PIXELS],
            ),
            "two images at one place": (
                0,
                msgspec.structs.replace(self.generate, items=[ITEM, ITEM]),
                [PROMPT, NO_IDS, PIXELS],
            ),
            "an image without pixels": (0, self.with_image, [PROMPT, NO_IDS]),
            "too few pixels": (0, self.with_image, [PROMPT, NO_IDS, PIXELS[1:]]),
            "pixels of no image": (0, self.generate, [PROMPT, NO_IDS, PIXELS]),
            "an id that the model does not have": (0, self.generate, [PROMPT + 1000, NO_IDS]),
            "an emitted id that the model does not have": (
                0,
                Generate("r~1/0", 1, PARAMS, [NewSequence("r~1/0/0", 0, 1)]),
                [PROMPT, PROMPT[:1] + 1000],
            ),
            "options that are no row": (
                0,
                msgspec.structs.replace(self.generate, options=NO_ROW),
                [PROMPT, NO_IDS],
            ),
            "a promise of no time": (
                0,
                msgspec.structs.replace(self.generate, options=NO_TIME_ROW),
                [PROMPT, NO_IDS],
            ),
            "long options": (
                0,
                msgspec.structs.replace(self.generate, options=LONG_ROW),
                [PROMPT, NO_IDS],
            ),
            "long lists": (
                0,
                msgspec.structs.replace(
                    self.generate, params=SamplingParams(0, allowed_token_ids=[5] * 300_000)
                ),
                [PROMPT, NO_IDS],
            ),
        }

    async def close(self) -> None:
        await self._service._link.close("the end")

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        ends = self._connect()
        is_of_worker = isinstance(self.examples[index][0], OF_WORKER)
        sender = ends.worker if is_of_worker else ends.tokenizer
        if index:
            self._service.on_message(ends.tokenizer, self.generate, [PROMPT, NO_IDS])
        self._service.on_message(ends.beside, OTHER, [PROMPT, NO_IDS])
        await self._begin_copies(ends, self.examples[index][0])
        if isinstance(self.examples[index][0], Arrived):
            self._service.on_message(ends.worker, INBOX, [])
        await asyncio.sleep(0)
        try:
            self._service.on_message(sender, message, arrays)
        except CodecError:
            is_good = False
            self._service.on_down(sender, "a bad message")
        else:  # a result the simulated worker never sent may still be accepted
            is_good = is_of_worker or not ends.tokenizer.take(Failed)
            if is_of_worker:
                self._service.on_down(sender, "it has lied")
        if is_of_worker:
            ends.worker, ends.simulated = self._new_worker(), SimulatedWorker(self.capacity)
        await self._run(ends)
        _check_other(ends.beside)
        for peer in (ends.tokenizer, ends.beside, ends.worker):
            self._service.on_down(peer, "the end")
        assert not self._service._core.sequences
        return is_good

    def _connect(self) -> _Ends:
        tokenizer = connect("tokenizer", self.model)
        beside = connect("tokenizer", self.model, name="beside")
        self._service.on_up(tokenizer)
        self._service.on_up(beside)
        return _Ends(tokenizer, beside, self._new_worker(), SimulatedWorker(self.capacity))

    async def _begin_copies(self, ends: _Ends, example: Message) -> None:
        """Blocks are loaded, fetched or spilled."""
        is_of_disk = isinstance(example, Fetched | Spilled) or example is DISK
        if not isinstance(example, Copied) and not is_of_disk:
            return
        is_below = isinstance(example, Fetched)
        memory = INVENTORY
        if isinstance(example, Spilled):  # there is no free place
            memory = msgspec.structs.replace(INVENTORY, store="full", num_places=2)
        full: list[np.ndarray] = [self.inventory[0], np.array([1, 0], np.int32)]
        self._service.on_message(ends.worker, memory, EMPTY if is_below else full)
        if isinstance(example, Fetched | Spilled):
            self._service.on_message(ends.worker, DISK, full if is_below else EMPTY)
        if isinstance(example, Copied | Fetched):
            stored = Generate("l~1/0", 1, PLAIN, [NewSequence("l~1/0/0")])
            self._service.on_message(ends.tokenizer, stored, [STORED, NO_IDS])
        await asyncio.sleep(0)  # it plans a step to admit, and next one with copies

    def _new_worker(self) -> FakePeer:
        worker = connect("worker", self.model, self.capacity)
        self._service.on_up(worker)
        return worker

    async def _run(self, ends: _Ends) -> None:
        """Runs until there are no plans."""
        await asyncio.sleep(0)
        while plans := ends.worker.take(StepPlan):
            for plan, arrays in plans:
                PlanCheck(self.capacity, self.model.vocab_size)._check_ids(plan, arrays[0])
                result, buffers = ends.simulated.step(Planned(plan, arrays[0]))
                self._service.on_message(ends.worker, result, list(buffers))
            await asyncio.sleep(0)


def _check_other(tokenizer: FakePeer) -> None:
    """Its prompt was accepted, and has the simulated worker's output."""
    ids, end = PROMPT.tolist(), [Finished(OTHER_SEQUENCE, 1, 0, "length", PLAIN.max_tokens or 0)]
    for _ in range(PLAIN.max_tokens or 0):
        ids.append(next_token(ids))
    assert [accepted.request for accepted, _ in tokenizer.take(Accepted)] == [OTHER.request]
    tokens = tokenizer.take(Tokens)
    assert [each for _, (part, *_) in tokens for each in part.tolist()] == ids[len(PROMPT) :]
    assert [each for message, _ in tokens for each in message.finished] == end
    assert not tokenizer.got

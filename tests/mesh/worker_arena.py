"""A worker by itself: an engine takes the plans accepted by the worker's check."""

import copy
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.step_engine import run_step
from services.worker.extension import WorkerCore, WorkerExtension
from services.worker.plan_check import PlanCheck
from services.worker.service import EXTENSIONS, OBSERVERS
from services.worker.step_thread import StepThread
from shared.errors import CodecError
from shared.link.extension import is_taken
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array, decode, encode
from shared.wire.messages import (
    FIRST_STATE,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Admit,
    Decode,
    Drop,
    Extend,
    Fetch,
    Forget,
    ForgetAdapter,
    Hello,
    Item,
    Keep,
    Load,
    LoadAdapter,
    Message,
    PlanRow,
    Pooling,
    Prefill,
    ResultRow,
    SamplingParams,
    Save,
    Spill,
    StepPlan,
    Unfetch,
)
from tests.mesh.arena_parts import (
    NO_IDS,
    NO_ROW,
    PARAMS,
    PLAIN,
    PROMPT,
    TRACED,
    Example,
    FakePeer,
    Lies,
)
from tests.services.worker.driver import table_of

COMPILE_S = 60


class WorkerArena:
    """The engine's state after earlier examples is reused, until a plan has reached it: then the
    engine is reset, and must compute the examples' first results again."""

    def __init__(self, engine: Any, is_fast: bool = False) -> None:
        """``engine`` is an AnyEngine."""
        self.is_fast = is_fast
        self._engine = engine
        self._scheduler = FakePeer(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "scheduler", "s"))
        self._ready_for: int | None = None
        self._check: PlanCheck
        self._results: dict[int, tuple[list[ResultRow], list[bytes]]] = {}
        blocks = list(range(4))
        first = StepPlan(
            1,
            [],
            [
                Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 0, PARAMS, blocks, options=TRACED),
                Admit(1, "b~1/0/0", 1, 0, 0, 3, 4, 0, PLAIN, [4, 5]),
            ],
            [],
            [Prefill(0, 4), Prefill(1, 3)],
            [],
            2,
        )
        rows = [Decode(0, 2), Decode(1)]
        second = StepPlan(2, [], [], [Extend(0, [6])], [], rows, 2)
        third = StepPlan(
            3,
            [1],
            [Admit(1, "c~1/0/0", 1, 1, 0, 4, 4, 0, PARAMS, [7, 8])],
            [],
            [Prefill(1, 4)],
            [Decode(0, 2)],
            2,
        )
        two = np.concatenate([PROMPT, PROMPT])
        most = engine.capacity.max_num_steps
        rows = [Decode(0, 2), Decode(1, 2)]
        fourth = StepPlan(4, [], [], [Extend(1, [9])], [], rows, 2, min(3, most))
        self.examples: list[Example] = [
            *((first, [two]), (second, [NO_IDS])),
            *((third, [PROMPT]), (fourth, [NO_IDS])),
            *((LoadAdapter("l1", "sql", "sql"), []), (ForgetAdapter(32 * "a"), [])),
        ]
        config = WorkerConfig()
        self._core = WorkerCore(
            config, engine, StepThread(), lambda: [self._scheduler], lambda: self._scheduler
        )
        max_len = engine.capacity.max_model_len
        long = Admit(1, "c~1/0/0", 1, 1, 0, 4, max_len + 1, 0, PLAIN, [7, 8])
        twice = StepPlan(2, [], [], [], [Prefill(1, 1)], [Decode(0), Decode(1)])
        many = StepPlan(2, [], [], [Extend(0, [6] * max_len)], [], [Decode(0), Decode(1)])
        no_row = replace(first, admit=[replace(first.admit[0], options=NO_ROW), first.admit[1]])
        longer = np.ones(max_len + 1, np.int32)
        too_many = StepPlan(2, [], [], [], [], [Decode(0)], 2, most + 1)
        self.lies: Lies = {
            "more ids than a slot holds": (2, StepPlan(3, [1], [long], [], [], []), [longer]),
            "options that are no row": (0, no_row, [two]),
            "two rows for a slot": (1, twice, [NO_IDS]),
            "more blocks than a slot holds": (1, many, [NO_IDS]),
            "more steps than a plan may have": (1, too_many, [NO_IDS]),
            "a row for no store": (1, replace(second, rows=[Forget(0)]), [NO_IDS]),
        }
        if most > 1:
            prompts = replace(first, num_steps=2)
            self.lies["several steps that begin with a prompt"] = (0, prompts, [two])
        self._compile()

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        extensions = self._extensions()
        if not isinstance(message, StepPlan):
            try:
                return is_taken(extensions, self._scheduler, message)
            except CodecError:
                return False
        if self._ready_for != index:
            self._prepare(index)
        try:
            copy.deepcopy(self._check).check(message, arrays[0])
            for extension in extensions:
                extension.check(message, arrays[1:])
            OBSERVERS[0]("w").begin(message)
        except CodecError:
            return False
        self._ready_for = None
        self._step(message, arrays)
        return True

    def _extensions(self) -> list[WorkerExtension]:
        return [make(self._core) for make in EXTENSIONS]

    async def close(self) -> None:
        """The engine keeps running sequences."""

    def _compile(self) -> None:
        """Synchronous, so that no result depends on its timing."""
        guides: Any = table_of(self._engine)._guides
        assert PARAMS.guide is not None
        guides.grammars.compile(PARAMS.guide.grammar).future.result(COMPILE_S)

    def _prepare(self, index: int) -> None:
        self._engine.reset()
        self._check = PlanCheck(self._engine.capacity, self._engine.model_info.vocab_size)
        for number, (plan, arrays) in enumerate(self.examples[:index]):
            assert isinstance(plan, StepPlan)
            self._check.check(plan, arrays[0])
            result = self._step(plan, arrays)
            assert result == self._results.setdefault(number, result), "it computes otherwise now"
        self._ready_for = index

    def _step(
        self, plan: StepPlan, arrays: list[np.ndarray]
    ) -> tuple[list[ResultRow], list[bytes]]:
        result, parts = run_step(self._engine, plan, arrays[0], arrays[1:])
        decode([bytes(frame) for frame in encode(result, parts)])
        return result.rows, [part.tobytes() for part in parts]


class WindowsWorkerArena(WorkerArena):
    """Half of its layers have a window of 5 tokens: after 100 ids, four blocks are passed."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, is_fast=True)
        prompt = np.resize(PROMPT, 100)
        row = (0, "a~1/0/0", 1, 0, 0, 100, 100, 0, PLAIN, [*range(7)])
        admit = Admit(*row, more_blocks=[[*range(7, 14)]])
        first = StepPlan(1, [], [admit], [], [Prefill(0, 100)], [])
        extend = Extend(0, [14], [[15]])
        second = StepPlan(2, [], [], [extend], [], [Decode(0)], rows=[Drop(0, 1, 4)])
        self.examples = [(first, [prompt]), (second, [NO_IDS])]
        null_block = engine.capacity.num_blocks
        bad_hit = replace(admit, num_cached=96)  # its first blocks should be null
        bad_extend = Extend(0, [14], [[null_block]])
        self.lies = {
            "blocks of too few groups": (0, replace(first, admit=[Admit(*row)]), [prompt]),
            "a hit with blocks behind a window": (0, replace(first, admit=[bad_hit]), [prompt]),
            "a null block to write to": (1, replace(second, extend=[bad_extend]), [NO_IDS]),
            "a drop without a window": (1, replace(second, rows=[Drop(0, 0, 4)]), [NO_IDS]),
            "a drop beyond the table": (1, replace(second, rows=[Drop(0, 1, 8)]), [NO_IDS]),
        }


class StatesWorkerArena(WorkerArena):
    """Of its four layers three have a state. A copy of it is made after 64 ids, and stays for a
    second sequence with the same beginning."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, is_fast=True)
        prompt = np.resize(PROMPT, 100)
        row = (1, 0, 0, 100, 100)
        admit = Admit(0, "a~1/0/0", *row, 0, PLAIN, [*range(7)], to_state=0)
        hit = Admit(1, "b~1/0/0", *row, 64, PLAIN, [*range(4), 7, 8, 9], from_state=0, to_state=2)
        first = StepPlan(1, [], [admit], [], [Prefill(0, 100)], [])
        second = StepPlan(2, [], [hit], [], [Prefill(1, 36)], [Decode(0)], rows=[Keep(0, 1)])
        self.examples = [(first, [prompt]), (second, [prompt])]
        beyond = engine.capacity.num_states
        ids = [prompt]
        self.lies = {
            "a copy without a place": (1, replace(second, rows=[Keep(0, beyond)]), ids),
            "no copy for cached ids": (1, _admitting(second, replace(hit, from_state=None)), ids),
            "a copy without cached ids": (0, _admitting(first, replace(admit, from_state=0)), ids),
            "a copy of other ids": (1, _admitting(second, replace(hit, num_cached=48)), ids),
            "copies without a place": (0, _admitting(first, replace(admit, to_state=beyond)), ids),
        }


def _admitting(plan: StepPlan, row: Admit) -> StepPlan:
    return replace(plan, admit=[row])


class MediaWorkerArena(WorkerArena):
    """Two images, the second encoded before a chunk needs it, and one of them again."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, is_fast=True)
        prompt: np.ndarray = np.resize(PROMPT, 16)
        one = Item(start=2, num_tokens=6, size=(1, 56, 84), digest=16 * b"a")
        other = Item(start=10, num_tokens=4, size=(1, 56, 56), digest=16 * b"b")
        pixels: np.ndarray = np.full(one.num_bytes, 77, np.uint8)
        more: np.ndarray = np.full(other.num_bytes, 78, np.uint8)
        row = (1, 0, 0, 16, 16, 0, PLAIN)
        admit = Admit(0, "a~1/0/0", *row, [0, 1], items=[one, other])
        again = Admit(1, "b~1/0/0", *row, [2, 3], items=[one])
        first = StepPlan(1, [], [admit], [], [Prefill(0, 10)], [])
        second = StepPlan(2, [], [again], [], [Prefill(0, 6), Prefill(1, 16)], [])
        arrays = [prompt, pixels, more]
        self.examples = [(first, arrays), (second, [prompt, pixels])]

        def lie(*items: Item) -> tuple[int, Message, list[np.ndarray]]:
            return 0, _admitting(first, replace(admit, items=[*items])), arrays

        self.lies = {
            "two images in one place": lie(one, replace(other, start=7)),
            "images backwards": lie(other, one),
            "an image beyond the prompt": lie(one, replace(other, start=13)),
            "more tokens than an image has": lie(replace(one, num_tokens=7), other),
            "a size that no image has": lie(replace(one, size=(1, 84, 57)), other),
            "two sizes of one image": lie(one, replace(other, digest=one.digest)),
            "an image without pixels": (0, first, [prompt, pixels]),
            "pixels of another size": (0, first, [prompt, pixels, pixels]),
            "pixels without an image": (1, second, arrays),
        }

    def _prepare(self, index: int) -> None:
        """Pixels under a wrong digest would stay."""
        self._engine.reset()
        encoder = self._engine.additions[0].encoder
        encoder._thread.submit(lambda: None).result()
        encoder._features = type(encoder._features)(1 << 20)
        super()._prepare(index)


class StoreWorkerArena(WorkerArena):
    """Full blocks and the state behind them go to a store, and come back for another sequence."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, is_fast=True)
        prompt, header = np.resize(PROMPT, 100), self._part.own.header
        capacity = engine.capacity
        keys, key = [16 * bytes([each]) for each in range(4)], 16 * b"k"
        row = (1, 0, 0, 100, 100)
        admit = Admit(0, "a~1/0/0", *row, 0, PLAIN, [*range(7)], to_state=0)
        first = StepPlan(1, [], [admit], [], [Prefill(0, 100)], [])
        saves = [Save(each, block, block + 2) for block, each in enumerate(keys)]
        saves += [Save(key, 0, FIRST_STATE + 1)]
        save = replace(first, step=2, admit=[], prefill=[], rows=saves)
        hit = Admit(1, "b~1/0/0", *row, 64, PLAIN, [*range(7, 14)], from_state=1, to_state=1)
        later = replace(save, step=3, admit=[hit], decode=[Decode(0)], rows=[])
        loads = [Load(each, 7 + block, header.id, block + 2) for block, each in enumerate(keys)]
        loads += [Load(key, 1, header.id, FIRST_STATE + 1, slot=1)]
        rows = [Forget(6), Forget(FIRST_STATE), *loads]
        load = replace(save, step=4, prefill=[Prefill(1, 36)], rows=rows)
        rows = [Forget(1, is_on_disk=True), Spill(keys[0], 2, 1), Fetch(keys[0], header.id, 1)]
        on_disk = replace(save, step=5, rows=[*rows, Unfetch(keys[0])])
        steps = [(first, prompt), (save, NO_IDS), (later, prompt), (load, NO_IDS)]
        self.examples = [(plan, [ids]) for plan, ids in (*steps, (on_disk, NO_IDS))]
        num_all = FIRST_STATE + header.num_states

        def lie(row: PlanRow) -> tuple[int, Message, list[np.ndarray]]:
            return 1, replace(save, rows=[row]), [NO_IDS]

        num_blocks, num_states = capacity.num_blocks, capacity.num_states
        self.lies = {
            "a block that the cache has not": lie(Save(key, num_blocks, 0)),
            "a state that the cache has not": lie(Save(key, num_states, FIRST_STATE)),
            "a place that the store has not": lie(Save(key, 0, num_all)),
            "a free place that the store has not": lie(Forget(num_all)),
            "a load to a block that the cache has not": lie(Load(key, num_blocks, "s", 0)),
            "a load to a state that the cache has not": lie(Load(key, num_states, "s", 0, 0)),
            "a place that the disk has not": lie(Spill(key, 0, num_all)),
            "a free place that the disk has not": lie(Forget(num_all, is_on_disk=True)),
            "an end of no fetch": lie(Unfetch(key)),
            "a load of no fetch": lie(Load(key, 0, "s", 0, is_fetched=True)),
            "a load to no slot": lie(Load(key, 0, "s", 0, capacity.max_num_seqs)),
        }

    @property
    def _part(self) -> Any:
        return self._engine.additions[-1].part

    def _extensions(self) -> list[WorkerExtension]:
        """Each has threads of its own. A former plan has admitted slot 1 with copy 1."""
        self._part.disk.stop()
        made: list[Any] = super()._extensions()
        made[-1]._awaited[1] = 1
        return made

    def _prepare(self, index: int) -> None:
        """Nobody has checked these plans, nor waits for their reports."""
        self._part.on_copied = lambda copied: None
        self._part.on_spilled = lambda step, copies: None
        super()._prepare(index)


class PoolingWorkerArena(WorkerArena):
    """Its model pools: one prompt in two chunks, next to one in a single chunk."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine, is_fast=True)
        mean = SamplingParams(seed=0, max_tokens=0, pooling=Pooling("mean", "normalize", 5))
        last = SamplingParams(seed=0, max_tokens=0, pooling=Pooling())
        first = StepPlan(
            1,
            [],
            [
                Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 0, mean, [0]),
                Admit(1, "b~1/0/0", 1, 0, 0, 4, 4, 0, last, [1]),
            ],
            [],
            [Prefill(0, 3), Prefill(1, 4)],
            [],
        )
        second = StepPlan(2, [1], [], [], [], [Decode(0)])
        self.examples = [(first, [np.concatenate([PROMPT, PROMPT])]), (second, [NO_IDS])]
        text = StepPlan(1, [], [Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 0, PLAIN, [0])], [], [], [])
        cached = StepPlan(1, [], [Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 2, mean, [0])], [], [], [])
        self.lies = {
            "a text of a model that pools": (0, text, [PROMPT]),
            "a mean with a cached part": (0, cached, [PROMPT]),
        }

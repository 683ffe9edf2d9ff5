"""Each receiver of messages by itself, without sockets: what a bad message may do there is to be
refused, or to fail its own request.

An arena has ``examples``, messages that are right, and takes a bad one in place of one of them; it
returns whether it was let through. ``lies`` are bad in more than one place, by what is wrong. What
does not decode reaches no receiver (``shared.peer.try_decode``), so arenas take what did.
"""

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.harness.engines import AnyEngine
from benchmarks.harness.step_engine import run_step
from services.gateway.mesh.mesh import Mesh
from services.gateway.requests.job import Job, Prompt
from services.scheduler.generate_check import check_generate
from services.scheduler.scheduler import Planned
from services.scheduler.service import SchedulerService
from services.tokenizer.lanes import Lanes
from services.tokenizer.requests import Requests
from services.tokenizer.service import TokenizerService
from services.worker.plan_check import PlanCheck
from shared.codec import Array, decode, encode
from shared.config.scheduler import SchedulerConfig
from shared.config.tokenizer import TokenizerConfig
from shared.errors import CodecError, InvalidRequest
from shared.messages import (
    PROTOCOL_MAJOR,
    Abort,
    Accepted,
    Admit,
    Cancel,
    Capacity,
    ChoiceStart,
    Convert,
    Converted,
    Credit,
    Decode,
    Delta,
    Deltas,
    Extend,
    Failed,
    Finished,
    Generate,
    Grant,
    Heartbeat,
    Hello,
    Lost,
    Message,
    ModelInfo,
    NewSequence,
    Prefill,
    RequestKey,
    ResultRow,
    RunKind,
    SamplingParams,
    ServiceName,
    State,
    StepPlan,
    StepResult,
    Submit,
    TextOptions,
    TokenRow,
    TokenRun,
    Tokens,
    Vocabulary,
)
from shared.model_folder import EMBEDDED_MODEL
from shared.peer import Peer
from tests.services.scheduler.simulated_worker import SimulatedWorker

NO_IDS = np.zeros(0, np.int32)
NO_ARRAYS = [NO_IDS, np.zeros(0, np.float32), NO_IDS, NO_IDS]
PROMPT = np.array([5, 6, 7, 8], np.int32)
# All that can be asked, so that all of it is there to be made odd.
PARAMS = SamplingParams(
    seed=3,
    temperature=0.5,
    top_k=5,
    top_p=0.9,
    max_tokens=6,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    min_tokens=1,
    stop_token_ids=[9],
    allowed_token_ids=[3, 4, 5, 6, 7, 8, 9, 10],
    logit_bias=[(4, 1.0)],
    bad_words=[[3, 4], [5]],
    logprobs=2,
    prompt_logprobs=1,
)
PLAIN = SamplingParams(seed=0, temperature=0.0, max_tokens=6)

Example = tuple[Message, list[np.ndarray]]


def connect(
    service: ServiceName, model: ModelInfo | None, capacity: Capacity | None = None
) -> "FakePeer":
    return FakePeer(Hello(PROTOCOL_MAJOR, 0, service, service[0], model, capacity))


class FakePeer(Peer):
    """Keeps what is sent to it, as it would have arrived."""

    def __init__(self, hello: Hello) -> None:
        super().__init__(hello, self._keep)
        self.got: list[tuple[Message, list[Array]]] = []

    def _keep(self, peer: Peer, message: Message, arrays: tuple[Array, ...]) -> None:
        self.got.append(decode([bytes(frame) for frame in encode(message, arrays)]))

    def take(self, kind: type) -> list[tuple[Any, list[Array]]]:
        taken = [each for each in self.got if isinstance(each[0], kind)]
        self.got = [each for each in self.got if not isinstance(each[0], kind)]
        return taken


class WorkerArena:
    """An engine takes a plan that its worker has let pass. What the examples before it left in the
    engine is used again, until a plan has reached it."""

    def __init__(self, engine: AnyEngine, is_native: bool = True) -> None:
        self.is_native = is_native
        self._engine = engine
        self._ready_for: int | None = None
        self._check: PlanCheck
        blocks = list(range(4))
        first = StepPlan(
            1,
            [],
            [
                Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 0, PARAMS, blocks),
                Admit(1, "b~1/0/0", 1, 0, 0, 3, 4, 0, PLAIN, [4, 5]),
            ],
            [],
            [Prefill(0, 4), Prefill(1, 3)],
            [],
        )
        second = StepPlan(2, [], [], [Extend(0, [6])], [], [Decode(0), Decode(1)])
        third = StepPlan(
            3,
            [1],
            [Admit(1, "c~1/0/0", 1, 1, 0, 4, 4, 0, PARAMS, [7, 8])],
            [],
            [Prefill(1, 4)],
            [Decode(0)],
        )
        two = np.concatenate([PROMPT, PROMPT])
        self.examples: list[Example] = [(first, [two]), (second, [NO_IDS]), (third, [PROMPT])]
        max_len = engine.capacity.max_model_len
        long = Admit(1, "c~1/0/0", 1, 1, 0, 4, max_len + 1, 0, PLAIN, [7, 8])
        twice = StepPlan(2, [], [], [], [Prefill(1, 1)], [Decode(0), Decode(1)])
        many = StepPlan(2, [], [], [Extend(0, [6] * max_len)], [], [Decode(0), Decode(1)])
        longer = np.ones(max_len + 1, np.int32)
        self.lies: dict[str, tuple[int, Message, list[np.ndarray]]] = {
            "more ids than a slot holds": (2, StepPlan(3, [1], [long], [], [], []), [longer]),
            "two rows for a slot": (1, twice, [NO_IDS]),
            "more blocks than a slot holds": (1, many, [NO_IDS]),
        }

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        if not isinstance(message, StepPlan):
            return True
        if self._ready_for != index:
            self._prepare(index)
        try:
            copy.deepcopy(self._check).check(message, arrays[0])
        except CodecError:
            return False
        self._ready_for = None
        self._step(message, arrays)
        return True

    def _prepare(self, index: int) -> None:
        self._engine.reset()
        self._check = PlanCheck(self._engine.capacity, self._engine.model_info.vocab_size)
        for plan, arrays in self.examples[:index]:
            assert isinstance(plan, StepPlan)
            self._check.check(plan, arrays[0])
            self._step(plan, arrays)
        self._ready_for = index

    def _step(self, plan: StepPlan, arrays: list[np.ndarray]) -> None:
        result, parts = run_step(self._engine, plan, arrays[0])
        decode([bytes(frame) for frame in encode(result, parts)])


@dataclass
class _Ends:
    """The two peers of a scheduler."""

    tokenizer: FakePeer
    worker: FakePeer
    simulated: SimulatedWorker


class SchedulerArena:
    """Requests go in above, a simulated worker that believes no plan computes them below."""

    model = ModelInfo(["m"], "f", 1000, 64, 1)
    capacity = Capacity(32, 4, 4, 16, 64, 1000)

    def __init__(self, directory: Path) -> None:
        self._service = SchedulerService(SchedulerConfig(mesh_dir=directory, instance="s"))
        self.generate = Generate("r~1/0", 1, PARAMS, [NewSequence("r~1/0/0")])
        two = [NewSequence("q~1/0/0", 0, 2), NewSequence("q~1/0/1", 1, 1, 1)]
        emitted = np.array([5, 6, 7], np.int32)
        key = RequestKey("r~1/0/0", 1)
        row = ResultRow(0, "r~1/0/0", 1, TokenRun(1, 3, 2))
        prompt_row = ResultRow(0, "r~1/0/0", 1, TokenRun(3, 2, 1, kind=RunKind.PROMPT))
        rows = [prompt_row, row]
        values = np.zeros(3 * 2 + 3, np.float32)
        ids, top_ids, ranks = (
            np.full(4, 7, np.int32),
            np.ones(3 + 2, np.int32),
            np.ones(4, np.int32),
        )
        self.examples: list[Example] = [
            (self.generate, [PROMPT, NO_IDS]),
            (Generate("q~1/0", 1, PLAIN, two, 1, "salt"), [PROMPT, emitted]),
            (Cancel([key]), []),
            (Credit([Grant(*_fields(key), 300, 1 << 22)]), []),
            (StepResult(1, rows, 0.1, 0.1), [ids, values, top_ids, ranks]),
        ]
        many, one = np.full(5000, 7, np.int32), np.full(2, 7, np.int32)
        plain = ResultRow(0, "r~1/0/0", 1, TokenRun(1))
        drafts = ResultRow(0, "r~1/0/0", 1, TokenRun(2, 1, kind=RunKind.DRAFTS))
        draft_arrays = [one, one.astype(np.float32), NO_IDS, one]
        self.lies: dict[str, tuple[int, Message, list[np.ndarray]]] = {
            "two rows for a slot": (4, StepResult(1, [plain, plain]), [one, *NO_ARRAYS[1:]]),
            "5000 tokens": (
                4,
                StepResult(1, [ResultRow(0, "r~1/0/0", 1, TokenRun(5000))]),
                [many, *NO_ARRAYS[1:]],
            ),
            "tokens before and after the end": (
                4,
                StepResult(1, [ResultRow(0, "r~1/0/0", 1, TokenRun(1), "stop"), plain]),
                [one, *NO_ARRAYS[1:]],
            ),
            "an end without a token": (
                4,
                StepResult(1, [ResultRow(0, "r~1/0/0", 1, TokenRun(0), "stop")]),
                NO_ARRAYS,
            ),
            "drafts without tokens": (4, StepResult(1, [drafts]), draft_arrays),
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
            "an id that the model does not have": (0, self.generate, [PROMPT + 1000, NO_IDS]),
            "an emitted id that the model does not have": (
                0,
                Generate("r~1/0", 1, PARAMS, [NewSequence("r~1/0/0", 0, 1)]),
                [PROMPT, PROMPT[:1] + 1000],
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
        is_of_worker = isinstance(self.examples[index][0], StepResult)
        sender = ends.worker if is_of_worker else ends.tokenizer
        if index:
            self._service.on_message(ends.tokenizer, self.generate, [PROMPT, NO_IDS])
        await asyncio.sleep(0)
        try:
            self._service.on_message(sender, message, arrays)
        except CodecError:
            is_good = False
            self._service.on_down(sender, "a bad message")
        else:  # the scheduler may accept it, though the simulated worker never sent it
            is_good = not ends.tokenizer.take(Failed)
            if is_of_worker:
                self._service.on_down(sender, "it has lied")
        if is_of_worker:
            ends.worker, ends.simulated = self._new_worker(), SimulatedWorker(self.capacity)
        await self._run(ends)
        self._service.on_down(ends.tokenizer, "the end")
        self._service.on_down(ends.worker, "the end")
        assert not self._service._core.sequences
        return is_good

    def _connect(self) -> _Ends:
        tokenizer = connect("tokenizer", self.model)
        self._service.on_up(tokenizer)
        return _Ends(tokenizer, self._new_worker(), SimulatedWorker(self.capacity))

    def _new_worker(self) -> "FakePeer":
        worker = connect("worker", self.model, self.capacity)
        self._service.on_up(worker)
        return worker

    async def _run(self, ends: _Ends) -> None:
        """Until there are no plans."""
        await asyncio.sleep(0)
        while plans := ends.worker.take(StepPlan):
            for plan, arrays in plans:
                PlanCheck(self.capacity, self.model.vocab_size)._check_ids(plan, arrays[0])
                result, buffers = ends.simulated.step(Planned(plan, arrays[0]))
                self._service.on_message(ends.worker, result, list(buffers))
            await asyncio.sleep(0)


class TokenizerArena:
    """What it passes on must be right, whatever came."""

    def __init__(self, directory: Path) -> None:
        config = TokenizerConfig(mesh_dir=directory, instance="t", model=str(EMBEDDED_MODEL))
        self._service = TokenizerService(config)
        self._model = self._service._load()
        text = np.frombuffer(b"Who leads the shoal?", np.uint8)
        chat = np.frombuffer(b'[{"role": "user", "content": "Hi"}]', np.uint8)
        options = TextOptions(["end"], ["bad"])
        starts = [ChoiceStart(0, 2, 3, 1), ChoiceStart(1)]
        self.submit = Submit("r~1/0", 1, "text", PARAMS, options, starts)
        two, name = np.array([5, 6], np.int32), "r~1/0/1"
        rows = [
            TokenRow(name, 1, 0, TokenRun(2, 2, 1, kind=RunKind.PROMPT), 1),
            TokenRow(name, 1, 0, TokenRun(1, 2, 1)),
        ]
        buffers = [
            np.array([5, 6, 7], np.int32),
            np.zeros(6, np.float32),
            np.ones(3, np.int32),
            np.ones(3, np.int32),
        ]
        self.examples: list[Example] = [
            (self.submit, [text, two]),
            (Submit("s~1/0", 1, "chat", PLAIN, TextOptions(), [ChoiceStart(0)]), [chat, NO_IDS]),
            (Submit("s~1/0", 1, "ids", PLAIN, TextOptions(), [ChoiceStart(0)]), [PROMPT, NO_IDS]),
            (Convert("c", "text", True), [text]),
            (Convert("c", "ids", True), [two]),
            (Cancel([RequestKey("r~1/0", 1)]), []),
            (Credit([Grant(name, 1, 300, 1 << 22)]), []),
            (Abort(["r"]), []),
            (Accepted("r~1/0", 1), [NO_IDS]),
            (Tokens(rows, [Finished(name, 1, 1, "length", 1)]), buffers),
            (Failed(name, 1, 400, "t", "c", "m", "prompt", 1.0), []),
        ]
        drafts = TokenRow(name, 1, 0, TokenRun(1, 1, kind=RunKind.DRAFTS))
        one = np.ones(1, np.int32)
        again = [ChoiceStart(0), ChoiceStart(0)]
        self.lies: dict[str, tuple[int, Message, list[np.ndarray]]] = {
            "drafts without tokens": (
                9,
                Tokens([drafts], []),
                [one, one.astype(np.float32), NO_IDS, one],
            ),
            "a stop without a token": (
                9,
                Tokens([TokenRow(name, 1, 0, TokenRun(0))], [Finished(name, 1, 1, "stop", 0)]),
                NO_ARRAYS,
            ),
            "a choice twice": (
                2,
                Submit("s~1/0", 1, "ids", PLAIN, TextOptions(), again),
                [PROMPT, NO_IDS],
            ),
            "resumed ids that the model does not have": (
                0,
                self.submit,
                [text, np.array([99_999_999, 5], np.int32)],
            ),
        }

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        gateway, scheduler = connect("gateway", None), connect("scheduler", None)
        kind = type(self.examples[index][0])
        sender, is_good = scheduler if kind in (Accepted, Tokens, Failed) else gateway, True
        async with asyncio.TaskGroup() as tasks:
            requests = self._service._requests = Requests(
                self._service._text, None, 10, Lanes(1), tasks, lambda: scheduler
            )
            if index:
                self._service.on_message(gateway, *self.examples[0])
                await _until(lambda: scheduler.got)
            try:
                self._service.on_message(sender, message, arrays)
            except CodecError:
                is_good = False
                requests.lose(sender)
        is_good = is_good and (kind is Failed or not gateway.take(Failed))
        for generate, (prompt, emitted) in scheduler.take(Generate):
            try:
                check_generate(generate, prompt, emitted, self._model.vocab_size, 2048)
            except InvalidRequest:
                assert index < 3, "what was right has become wrong"
        requests.lose(gateway)
        requests.lose(scheduler)
        assert len(requests) == 0
        return is_good


class GatewayArena:
    """An open prompt of two choices, and messages of a tokenizer about it."""

    model = ModelInfo(["m"], "f", 100, 64, 1)

    def __init__(self) -> None:
        rows = [
            Delta("r/0", 1, 0, 0, TokenRun(2, 2, 1), "ab"),
            Delta("r/0", 1, 1, 0, TokenRun(1, 2, 1), "c"),
        ]
        buffers = [
            np.array([5, 6, 7], np.int32),
            np.zeros(6, np.float32),
            np.ones(3, np.int32),
            np.ones(3, np.int32),
        ]
        prompts = [Prompt("ids", PROMPT)]
        self._job = Job("m", prompts, 2, PARAMS, TextOptions(), 0, True, False)
        vocabulary: list[np.ndarray] = [np.zeros(100, np.uint8), np.ones(100, np.int32)]
        self.examples: list[Example] = [
            (Accepted("r/0", 1), [PROMPT]),
            (Deltas(rows, [Finished("r/0", 1, 0, "stop", 2, "x", 1)]), buffers),
            (Failed("r/0", 1, 503, "t", "c", "m", "prompt", 1.0), []),
            (Lost([RequestKey("r/0", 1)]), []),
            (Converted("convert-0"), [PROMPT]),
            (Vocabulary(), vocabulary),
        ]
        self.lies: dict[str, tuple[int, Message, list[np.ndarray]]] = {
            "other lengths than bytes": (5, Vocabulary(), [vocabulary[0], 2 * vocabulary[1]]),
            "an id that the model does not have": (0, Accepted("r/0", 1), [PROMPT + 100]),
        }

    async def take(self, index: int, message: Message, arrays: list[Array]) -> bool:
        mesh, peer, is_good = Mesh(1, 1, 1), connect("tokenizer", self.model), True
        peer.status = Heartbeat(State.READY, "", 0, 0)
        mesh.on_up(peer)
        with mesh.generate("r", self._job) as exchange:
            if index:
                mesh.on_message(peer, Accepted("r/0", 1), [PROMPT])
            converting = asyncio.create_task(mesh.conversions.convert("text", NO_IDS, True))
            await asyncio.sleep(0)
            try:
                mesh.on_message(peer, message, arrays)
            except CodecError:
                is_good = False
                mesh.on_down(peer, "a bad message")
            while (progress := exchange._take()) is not None:
                exchange.consumed(progress)
            converting.cancel()
            await asyncio.gather(converting, return_exceptions=True)
        assert not mesh._prompts()
        return is_good


def _fields(key: RequestKey) -> tuple[str, int]:
    return key.request, key.attempt


async def _until(is_true: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not is_true():
            await asyncio.sleep(0)

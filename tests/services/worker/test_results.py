"""When results leave the worker: short steps two by two, unless somebody waits for one of them."""

import asyncio
from concurrent.futures import Future
from queue import SimpleQueue

import numpy as np
import pytest

from services.worker.engine.protocol import StepOutput
from services.worker.plan_check import PlanCheck
from services.worker.service import WorkerService
from shared.config.worker import WorkerConfig
from shared.messages import (
    SHORT_STEP_S,
    Admit,
    Capacity,
    Decode,
    FinishReason,
    Prefill,
    ResultRow,
    SamplingParams,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.token_arrays import TokenArrays
from tests.mesh.arena_parts import NO_IDS, PROMPT, FakePeer, connect

CAPACITY = Capacity(64, 16, 4, 64, 64, vocab_size=100)


class Engine:
    """Ends a step when it is told to."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[tuple[StepPlan, Future[StepOutput]]] = SimpleQueue()

    num_running = 1

    def submit(self, plan: StepPlan, ids: np.ndarray, output: Future[StepOutput]) -> None:
        self.begun.put((plan, output))

    def end(self, step_s: float = SHORT_STEP_S / 2, finish: FinishReason | None = None) -> None:
        plan, output = self.begun.get(timeout=60)
        row = ResultRow(0, "a~1/0/0", 1, TokenRun(1), finish)
        arrays = TokenArrays(np.zeros(1, np.int32))
        output.set_result((StepResult(plan.step, [row], step_s), arrays))


class Worker:
    """A service whose scheduler has sent a plan for a prompt, and ``num`` that decode."""

    def __init__(self, num: int) -> None:
        self.engine = Engine()
        self.peer: FakePeer = connect("scheduler", None)
        self._service = WorkerService(WorkerConfig(), lambda config, progress: self.engine)  # type: ignore[arg-type,return-value]
        self._service._engine = self.engine  # type: ignore[assignment]
        self._service._plan_check = PlanCheck(CAPACITY, CAPACITY.vocab_size)
        self._service.on_up(self.peer)
        params = SamplingParams(seed=0)
        admit = Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 0, params, [0])
        plans = [StepPlan(1, [], [admit], [], [Prefill(0, 4)], [])]
        plans += [StepPlan(2 + each, [], [], [], [], [Decode(0)]) for each in range(num)]
        for plan in plans:
            self._service.on_message(self.peer, plan, [PROMPT if plan.admit else NO_IDS])

    async def sent(self) -> list[int]:
        """The steps whose results have gone out since the last look."""
        await asyncio.sleep(0)
        return [result.step for result, _ in self.peer.take(StepResult)]


async def test_short_steps_are_sent_two_by_two_while_others_are_in_flight() -> None:
    worker = Worker(num=5)
    worker.engine.end()
    assert await worker.sent() == [1], "first tokens do not wait"
    worker.engine.end()
    assert not await worker.sent()
    worker.engine.end()
    assert await worker.sent() == [2, 3]
    worker.engine.end()
    assert not await worker.sent()
    worker.engine.end()
    assert await worker.sent() == [4, 5]
    worker.engine.end()
    assert await worker.sent() == [6], "nothing comes after it"


async def test_the_scheduler_gets_a_result_while_the_last_plan_runs() -> None:
    worker = Worker(num=2)
    worker.engine.end()
    worker.engine.end()
    assert await worker.sent() == [1, 2]


@pytest.mark.parametrize(
    ("step_s", "finish"), [(2 * SHORT_STEP_S, None), (SHORT_STEP_S / 2, "stop")]
)
async def test_long_steps_and_ends_do_not_wait(step_s: float, finish: FinishReason | None) -> None:
    worker = Worker(num=4)
    worker.engine.end()
    worker.engine.end(step_s, finish)
    assert await worker.sent() == [1, 2]


async def test_a_step_that_fails_is_heard_of_at_once() -> None:
    worker = Worker(num=4)
    worker.engine.end()
    assert await worker.sent() == [1]
    caught: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: caught.append(context.get("exception")))
    _, output = worker.engine.begun.get(timeout=60)
    output.set_exception(ValueError("broken"))
    await asyncio.sleep(0)
    assert isinstance(caught[0], ValueError)

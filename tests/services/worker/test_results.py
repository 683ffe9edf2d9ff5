"""Results leave the worker as soon as their step has ended, in the order of the plans."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from unittest.mock import Mock

import numpy as np
import pytest

from services.worker.engine.protocol import StepOutput
from services.worker.plan_check import PlanCheck
from services.worker.service import WorkerService
from shared.errors import CodecError
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    Admit,
    Attach,
    Capacity,
    Decode,
    Heartbeat,
    Overview,
    Prefill,
    ResultRow,
    SamplingParams,
    State,
    StepPlan,
    StepResult,
    TokenRun,
)
from shared.wire.token_arrays import TokenArrays
from tests.mesh.arena_parts import NO_IDS, PROMPT, FakePeer, connect

CAPACITY = Capacity(64, 16, 4, 64, 64, vocab_size=100, max_num_steps=3)


class Engine:
    """Ends a plan's steps on request."""

    def __init__(self) -> None:
        self.begun: SimpleQueue[tuple[StepPlan, Future[StepOutput]]] = SimpleQueue()

    num_running = 1

    def reset(self) -> None: ...

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        self.begun.put((plan, output))

    def end(self) -> None:
        plan, output = self.begun.get(timeout=60)
        rows = [ResultRow(0, "a~1/0/0", 1, TokenRun(1))] * plan.num_steps
        arrays = TokenArrays(np.zeros(plan.num_steps, np.int32))
        result = StepResult(plan.step, rows, 0.001, num_steps=plan.num_steps)
        output.set_result((result, arrays))


class Worker:
    """A service with a plan for a prompt, and one of each of ``nums`` steps."""

    def __init__(self, *nums: int) -> None:
        self.engine = Engine()
        self.peer: FakePeer = connect("scheduler", None)
        self.service = WorkerService(WorkerConfig(), lambda config, progress: self.engine)  # type: ignore[arg-type,return-value]
        self.service._engine = self.engine  # type: ignore[assignment]
        self.service._plan_check = PlanCheck(CAPACITY, CAPACITY.vocab_size)
        self.service.on_up(self.peer)
        params = SamplingParams(seed=0)
        admit = Admit(0, "a~1/0/0", 1, 0, 0, 4, 4, 0, params, [0])
        self.send(StepPlan(1, [], [admit], [], [Prefill(0, 4)], []))
        for step, num_steps in enumerate(nums, 2):
            self.send(StepPlan(step, [], [], [], [], [Decode(0)], 0, num_steps))

    def send(self, plan: StepPlan) -> None:
        self.service.on_message(self.peer, plan, [PROMPT if plan.admit else NO_IDS])

    async def sent(self) -> list[int]:
        """The plans with results sent since the last call."""
        await asyncio.sleep(0)
        return [result.step for result, _ in self.peer.take(StepResult)]


async def test_results_are_sent_one_by_one_and_count_their_steps() -> None:
    worker = Worker(1, 3, 2)
    num_steps = []
    for step in range(1, 5):
        worker.engine.end()
        assert await worker.sent() == [step]
        num_steps.append(worker.service.status().num_steps)
    assert num_steps == [1, 2, 5, 7]


async def test_a_prompts_result_goes_out_before_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("services.worker.service.TAKE_S", 60.0)
    worker = Worker(1)

    def end() -> int:
        worker.engine.end()
        return len(worker.peer.got)

    assert await on_step_thread(worker, end) == 1
    await on_step_thread(worker, end)  # of a decode-only plan: no wait
    assert await worker.sent() == [1, 2]


async def test_threads_that_bring_results_alone_do_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For engines of GPUs and of stages."""
    monkeypatch.setattr("services.worker.service.TAKE_S", 60.0)
    worker = Worker()
    worker.engine.end()  # on the loop's thread, which would have to set the event it waits for
    assert await worker.sent() == [1]


@pytest.mark.parametrize("late_s", [0.0, 100.0])
async def test_a_worker_whose_step_hangs_attaches_to_no_scheduler(late_s: float):
    worker = Worker()
    worker.service.on_down(worker.peer, "no result")
    scheduler = connect("scheduler", None)
    overview = Overview("s", 0, 0, 0, 0, 0, 0)
    scheduler.status = Heartbeat(State.READY, "", 0, 0, overview=overview)
    worker.service._link = Mock(peers=[scheduler])
    worker.service._last_progress_s -= late_s
    worker.service._attach()
    assert bool(scheduler.take(Attach)) == (not late_s)


async def on_step_thread(worker: Worker, call: Callable[[], int]) -> int:
    return await asyncio.wrap_future(worker.service._step_thread.executor.submit(call))


async def test_a_plan_of_more_steps_than_the_engine_takes_is_refused_by_name() -> None:
    worker = Worker()
    with pytest.raises(CodecError, match="a plan of 4 steps; the limit is 3"):
        worker.send(StepPlan(2, [], [], [], [], [Decode(0)], 0, 4))
    with pytest.raises(CodecError, match="a plan of 2 steps computes prompts"):
        worker.send(StepPlan(2, [], [], [], [Prefill(0, 1)], [], 0, 2))


async def test_a_step_that_fails_is_heard_of_at_once() -> None:
    worker = Worker(1, 1)
    worker.engine.end()
    assert await worker.sent() == [1]
    caught: list[BaseException | None] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: caught.append(context.get("exception")))
    _, output = worker.engine.begun.get(timeout=60)
    output.set_exception(ValueError("broken"))
    await asyncio.sleep(0)
    assert isinstance(caught[0], ValueError)

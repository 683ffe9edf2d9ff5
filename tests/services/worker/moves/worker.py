"""Workers without a scheduler: engines with the parts that move blocks, and plans for them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.engines import make_engine
from services.worker.block_layout.memory import BlockMemory
from services.worker.engine.protocol import StepOutput
from services.worker.extension import WorkerCore
from services.worker.moves.addition import KVTransfer
from services.worker.moves.extension import WorkerMoves
from services.worker.step_thread import StepThread
from shared.settings.worker import WorkerConfig
from shared.wire.messages import (
    MOVED_POINTS_MINOR,
    PROTOCOL_MAJOR,
    Admit,
    Arrived,
    Decode,
    Discard,
    Hello,
    Inbox,
    Meet,
    Prefill,
    Push,
    RunKind,
    SamplingParams,
    StepPlan,
    Take,
)
from tests.mesh.arena_parts import FakePeer

PARAMS = SamplingParams(seed=7, temperature=0.8, max_tokens=24, ignore_eos=True, logprobs=2)
NO_IDS = np.zeros(0, np.int32)
PAUSE_S = 0.01

Output = list[tuple[list[int], list[float]]]  # ids and logprobs of each step


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def random_ids(num: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, vocab_size, num).tolist()


def scheduler(minor: int = MOVED_POINTS_MINOR, name: str = "s") -> FakePeer:
    return FakePeer(Hello(PROTOCOL_MAJOR, minor, "scheduler", name))


def plan_of(*rows: Any, step: int = 1) -> StepPlan:
    return StepPlan(step, [], [], [], [], [], rows=[*rows])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(PAUSE_S)


class MovingWorker:
    """Attached to ``home`` while ``working`` runs, and linked with the schedulers ``others``."""

    def __init__(self, config: WorkerConfig, engine: Any) -> None:
        self.config, self.engine = config, engine
        self.home: Any = scheduler()
        self.others: list[FakePeer] = []
        self.step_thread = StepThread()
        core = WorkerCore(config, engine, self.step_thread, lambda: self.others, lambda: self.home)
        self.moves = WorkerMoves(core)
        (addition,) = [each for each in engine.additions if isinstance(each, KVTransfer)] or [None]
        self.part: Any = addition and addition.part
        self.memory = BlockMemory(engine._kv_cache.sections)
        self.num_accepted = 0
        self._step = 0

    @property
    def inbox(self) -> Inbox:
        """As the scheduler sees it."""
        ((message, _),) = self.home.take(Inbox)
        assert isinstance(message, Inbox)
        return message

    @property
    def num_full(self) -> int:
        return len(self.moves._inbox)

    def bytes_of(self, block: int) -> bytes:
        return b"".join(self.memory.pieces(block))

    async def settle(self) -> None:
        """Waits for the step thread."""
        await asyncio.wrap_future(self.step_thread.executor.submit(lambda: None))

    def leave(self, home: FakePeer) -> None:
        """As after the loss of the scheduler, with ``home`` as the next one."""
        self.home = None
        self.step_thread.submit(self.engine.reset)
        self.moves.clear()
        self.home = home
        self.moves.on_attach(home)

    def meet(self, other: "MovingWorker", are_guests: bool = False) -> None:
        inbox = other.inbox
        address = "" if inbox.location == self.inbox.location else inbox.address
        assert self.moves.takes(self.home, Meet(other.config.instance, address, are_guests))

    def meet_again(self, other: "MovingWorker") -> None:
        """As a worker of its own cell."""
        assert self.moves.takes(self.home, Meet(other.config.instance))

    async def push(self, other: "MovingWorker", blocks: Sequence[int], first: int = 0) -> None:
        """Block number i has the key of ``first`` + i."""
        name = other.config.instance
        await self.run(*(Push(key_of(first + i), each, name) for i, each in enumerate(blocks)))

    async def arrived(self, num: int) -> None:
        """Waits until ``num`` more blocks have come."""
        while num > 0:
            num -= sum(len(each.keys) for each, _ in self.home.take(Arrived))
            await asyncio.sleep(PAUSE_S)

    async def take(self, blocks: Sequence[int], first: int = 0) -> None:
        await self.run(*(Take(key_of(first + i), each) for i, each in enumerate(blocks)))

    async def run(self, *rows: Push | Take | Discard) -> None:
        await self.step(rows=rows)

    async def prefill(
        self,
        ids: list[int],
        prompt_len: int,
        blocks: list[int],
        num_cached: int,
        depth: int,
        **others: Any,
    ) -> Output:
        """``others`` are fields of the Admit."""
        row = Admit(0, "r", 1, 0, 0, prompt_len, len(ids), num_cached, PARAMS, blocks)
        row = replace(row, **others)
        prefill = [Prefill(0, len(ids) - num_cached)]
        found, _ = await self.step([row], np.array(ids, np.int32), prefill, depth=depth)
        return [found]

    async def decode(self, most: int, depth: int) -> Output:
        """Up to ``most`` steps, or to the end."""
        steps: Output = []
        is_over = False
        while len(steps) < most and not is_over:
            found, is_over = await self.step(decode=[Decode(0, depth)], depth=depth)
            steps.append(found)
        return steps

    async def step(
        self,
        admit: Sequence[Admit] = (),
        ids: np.ndarray = NO_IDS,
        prefill: Sequence[Prefill] = (),
        decode: Sequence[Decode] = (),
        depth: int = 0,
        rows: Sequence[Any] = (),
        release: Sequence[int] = (),
    ) -> tuple[tuple[list[int], list[float]], bool]:
        """The output of a plan, and whether the sequence is over."""
        self._step += 1
        plan = StepPlan(
            self._step, [*release], [*admit], [], [*prefill], [*decode], depth, rows=[*rows]
        )
        self.moves.check(plan, [])
        output: Future[StepOutput] = Future()
        self.step_thread.submit(self.engine.submit, plan, ids, output)
        result, arrays = await asyncio.wrap_future(output)
        await self.settle()  # drafts follow the result, and engines of one process must take turns
        outputs = [row for row in result.rows if row.run.kind == RunKind.OUTPUT]
        self.num_accepted += sum(row.run.num_accepted for row in outputs)
        is_over = any(row.finish for row in result.rows)
        return (arrays[0].tolist(), arrays[1].tolist()), is_over


@asynccontextmanager
async def working(
    model: Path, folder: Path, name: str, kernels: str = "native", **settings: Any
) -> AsyncIterator[MovingWorker]:
    """Has sent its Inbox."""
    options: dict[str, Any] = {
        "kv_transfer": True,
        "max_model_len": 128,
        "num_gpu_blocks_override": 64,
        "speculative_config": {"method": "none"},
    }
    links: dict[str, Any] = {"mesh_dir": folder, "instance": name}
    own = ("keys", "kv_transfer_address", "worker_role")
    links |= {key: settings.pop(key) for key in own if key in settings}
    links["insecure_tcp"] = "keys" not in links
    engine = make_engine(model, kernels, **(options | settings))
    worker = MovingWorker(WorkerConfig(**links), engine)
    running = asyncio.create_task(worker.moves.run())
    await asyncio.sleep(0)
    worker.moves.on_attach(worker.home)
    try:
        yield worker
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        worker.moves.close()
        worker.step_thread.executor.shutdown()

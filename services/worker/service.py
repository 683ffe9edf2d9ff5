"""The worker process: the IO thread (this event loop) and the step thread, which computes."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Event
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from services.worker.adapters.extension import WorkerAdapters
from services.worker.attachment import Attachment
from services.worker.engine.protocol import BuildEngine, StepOutput
from services.worker.extension import Observer, OtherRanks, WorkerCore, WorkerExtension
from services.worker.media.encoder_service import EncoderService
from services.worker.media.extension import WorkerMedia
from services.worker.metrics import (
    SEQUENCES,
    STEP_BUSY_SECONDS,
    STEP_IDLE_SECONDS,
    STEPS,
    device_stats,
    memory_stats,
)
from services.worker.moves.extension import WorkerMoves
from services.worker.plan_check import PlanCheck
from services.worker.ranks.extension import WorkerRanks
from services.worker.step_thread import StepThread, call_soon
from services.worker.stores.extension import WorkerStores
from services.worker.traces.slot_spans import SlotSpans
from services.worker.weights.progress import ProgressLines
from shared.errors import LostError
from shared.link.extension import is_taken
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.process.cores import bind_to_node
from shared.process.log import log_end
from shared.process.report import make_report
from shared.process.service import Service
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.kv_groups import tokens_that_fit
from shared.wire.messages import (
    CELLS_MINOR,
    EVERY_LAYER,
    GROUPS_MINOR,
    POOLING_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    STATES_MINOR,
    Heartbeat,
    Hello,
    Inquire,
    Message,
    Release,
    Reset,
    RunKind,
    State,
    Stats,
    StepPlan,
)

log = logging.getLogger(__name__)

WATCH_S = 1.0
ATTACH_S = 0.5  # between two looks for a better scheduler
CHOOSE_S = 0.05  # time for all schedulers dialled together to report their state
TAKE_S = 1e-3  # the step thread's longest wait for a result to be sent
MOVE_SHARE = 1 / 2  # of drain-timeout-s

OBSERVERS: tuple[type[Observer], ...] = (
    SlotSpans,
    Observer,
)
"""The first one is used."""
RANKS: tuple[type[OtherRanks], ...] = (
    WorkerRanks,
    OtherRanks,
)
"""The first one is used."""
ENCODERS: list[Callable[[WorkerConfig], Service]] = [
    EncoderService,
]
"""Services of the role encoder."""
EXTENSIONS: list[Callable[[WorkerCore], WorkerExtension]] = [
    WorkerAdapters,
    WorkerMedia,
    WorkerMoves,
    WorkerStores,
]


class WorkerService:
    """Loads the model before it dials, so that no scheduler waits for a loading worker.

    It is the first rank if several share the model: the others compute every plan too.
    """

    def __init__(self, config: WorkerConfig, build: BuildEngine) -> None:
        self._ranks = RANKS[0](config)
        self._config = self._ranks.config
        self._build = build
        self._step_thread = StepThread()
        self._progress = "starting"
        self._progress_lines = ProgressLines(time.monotonic())
        self._link: Link | None = None
        self._load = self._num_steps = self._num_pending = 0
        self._last_progress_s = time.monotonic()
        self._is_draining = self._is_stopped = False
        self._idle = asyncio.Event()
        self._log = SlotLog()
        self._observer = OBSERVERS[0](config.instance)
        self._extensions: list[WorkerExtension] = []
        self._attachment = Attachment(
            config.instance,
            self._peers,
            MOVE_SHARE * config.drain_timeout_s,
            self._forget_sequences,
            self._greet,
        )

    def _peers(self) -> Collection[Peer]:
        return self._link.peers if self._link is not None else ()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(self._ranks.run())
            await self._ranks.until_assembled()
            await self._run()
            running.cancel()

    async def _run(self) -> None:
        if self._config.numa_node is not None and (why := bind_to_node(self._config.numa_node)):
            log.warning("numa-node: memory cannot be bound to the node (%s)", why)
        keys = load_keys(self._config.keys, "worker")
        loop = asyncio.get_running_loop()
        self._engine = await loop.run_in_executor(
            self._step_thread.executor, self._build, self._config, self._note_progress
        )
        await self._ranks.until_up()
        instance = self._config.instance
        model, capacity = self._engine.model_info, self._engine.capacity
        self._plan_check = PlanCheck(capacity, model.vocab_size)
        core = WorkerCore(
            self._config,
            self._engine,
            self._step_thread,
            self._peers,
            lambda: self._attachment.home,
        )
        self._extensions = [make(core) for make in EXTENSIONS]
        hello = Hello(
            major=PROTOCOL_MAJOR,
            minor=PROTOCOL_MINOR,
            service="worker",
            instance=instance,
            model=model,
            capacity=capacity,
        )
        self._link = Link(hello, self, keys)
        addresses = self._config.scheduler_address
        directory = self._config.mesh_dir
        self._link.dial("scheduler", directory, role="workers", tcp=addresses)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_steps())
                tasks.create_task(self._stay_attached())
                tasks.create_task(self._leave_with_ranks())
                for extension in self._extensions:
                    tasks.create_task(extension.run())
                await self._link.run()
        finally:
            try:
                await self._link.close("the worker leaves", is_planned=self._is_draining)
            finally:  # no plan comes any more
                for extension in self._extensions:
                    extension.close()

    async def _leave_with_ranks(self) -> None:
        """Raises LostError once a rank was told to stop and open sequences have ended. If this rank
        was told too, it just ends."""
        await self._ranks.until_one_leaves()
        await self._end_open()
        if not self._is_stopped:
            raise LostError("a rank was told to stop")

    async def drain(self) -> None:
        self._is_stopped = True
        await self._end_open()

    async def _end_open(self) -> None:
        """Finishes open sequences. After half of the time the remaining ones are handed over one by
        one, after three quarters all at once."""
        if self._link is None:
            return
        if self._is_draining:  # already under way
            await self._idle.wait()
            return
        self._is_draining = True
        self._link.send_status()
        self._note_load()
        for share in (1 / 2, 1 / 4):
            try:
                async with asyncio.timeout(self._config.drain_timeout_s * share):
                    await self._idle.wait()
            except TimeoutError:
                if self._attachment.home is not None:
                    self._attachment.home.send(Release())
        await self._idle.wait()

    def status(self) -> Heartbeat:
        state, reason = self._state()
        return Heartbeat(state, reason, self._load, self._num_steps)

    def _state(self) -> tuple[State, str]:
        if self._is_draining:
            return State.DRAINING, "finishing open requests"
        if self._link is None:
            return State.NOT_READY, self._ranks.missing or self._progress
        if self._attachment.home is None:
            return State.NOT_READY, "no scheduler is connected"
        if self._hangs:
            return State.NOT_READY, f"no step has finished for {self._busy_s():.0f} s"
        if self._attachment.is_moving:
            return State.DRAINING, "moving to a scheduler that has fewer workers"
        return State.READY, ""

    def refusal(self, hello: Hello) -> str | None:
        capacity, home = self._engine.capacity, self._attachment.home
        for is_needed, minor, what in (
            (capacity.pooled_size > 0, POOLING_MINOR, "pooling"),
            (capacity.groups != EVERY_LAYER, GROUPS_MINOR, "groups of layers with windows"),
            (capacity.num_states is not None, STATES_MINOR, "states of layers"),
        ):
            if is_needed and hello.minor < minor:
                return f"protocol minor {hello.minor} knows of no {what}, {minor} does"
        if hello.minor < CELLS_MINOR and home is not None:
            return f"attached to scheduler {home.hello.instance}, so not to {hello.instance}"
        return None

    def on_up(self, peer: Peer) -> None:
        self._attachment.add(peer, time.monotonic())
        for extension in self._extensions:
            extension.on_up(peer)
        asyncio.get_running_loop().call_later(CHOOSE_S, self._attach)

    def on_down(self, peer: Peer, reason: str) -> None:
        self._attachment.lose(peer)
        for extension in self._extensions:
            extension.on_down(peer)
        self._attach()

    async def _stay_attached(self) -> None:
        while True:
            await asyncio.sleep(ATTACH_S)
            self._attach()

    def _attach(self) -> None:
        """Does nothing while a step hangs: sequences would be lost with this process."""
        if self._link is None or self._is_draining or self._hangs:
            return
        self._attachment.look(time.monotonic(), self._load == self._num_pending == 0)
        self._link.send_status(only_changes=True)

    def _greet(self, home: Peer) -> None:
        for extension in self._extensions:
            extension.on_attach(home)

    def _is_home(self, scheduler: Peer) -> bool:
        return scheduler is self._attachment.home

    def _forget_sequences(self) -> None:
        """The next scheduler knows nothing of them."""
        self._ranks.send(Reset())
        self._step_thread.submit(self._engine.reset)
        self._log.clear()
        self._observer.clear()
        self._plan_check.clear()
        for extension in self._extensions:
            extension.clear()
        self._load = 0
        self._note_load()

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        if isinstance(message, StepPlan):
            if self._is_home(peer):  # a former one may have sent it before it knew
                self._step(peer, message, arrays[0], arrays[1:])
        elif isinstance(message, Inquire):
            assert self._link is not None
            peer.send(make_report(self._link, self.details(), lists=self._is_home))
        elif not is_taken(self._extensions, peer, message):
            log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)

    def details(self) -> Stats:
        """Empty before a model is loaded."""
        if self._link is None:
            return {}
        capacity = self._engine.capacity
        model, folder = self._engine.model_info, Path(self._config.model)
        return {
            "model": folder.resolve().name if folder.is_dir() else self._config.model,
            "dtype": model.dtype,
            "quantization": model.quantization,
            "kv_cache_dtype": model.kv_cache_dtype,
            "max_model_len": model.max_model_len,
            "max_num_seqs": capacity.max_num_seqs,
            "kv_cache_tokens": tokens_that_fit(capacity, capacity.max_model_len),
            **memory_stats(),
            **device_stats(),
        }

    def _step(self, peer: Peer, plan: StepPlan, ids: np.ndarray, pixels: Sequence[Array]) -> None:
        """Submits to the step thread at once, so that a later reset runs after it. Raises
        CodecError for a plan that cannot be run."""
        self._plan_check.check(plan, ids)
        for extension in self._extensions:
            extension.check(plan, pixels)
        self._observer.begin(plan)
        if self._num_pending == 0:
            self._last_progress_s = time.monotonic()
        self._num_pending += 1
        loop = asyncio.get_running_loop()
        taken = Event() if plan.prefill else None
        output: Future[StepOutput] = Future()

        def deliver(done: Future[StepOutput]) -> None:
            call_soon(loop, self._send_result, peer, done, time.time(), taken)
            # Else a first token waits while the next step holds the interpreter lock.
            if taken and self._step_thread.is_current() and _has_first_tokens(plan, done):
                taken.wait(TAKE_S)

        output.add_done_callback(deliver)
        self._ranks.send(plan, ids)  # the first rank alone encodes images
        self._step_thread.submit(self._engine.submit, plan, ids, output, pixels)
        self._log.note(plan)

    def _send_result(
        self, peer: Peer, output: Future[StepOutput], ended_s: float, taken: Event | None
    ) -> None:
        """Raises the error of the step, which ends the service. ``ended_s`` is unix time; ``taken``
        is set once the result is sent, if the step thread may wait for it."""
        result, arrays = output.result()
        if reports := self._observer.end(result, ended_s):
            result = replace(result, spans=reports)
        peer.send(result, *arrays)
        if taken:
            asyncio.get_running_loop().call_soon(taken.set)
        self._num_pending -= 1
        self._last_progress_s = time.monotonic()
        self._num_steps += result.num_steps
        STEPS.inc(result.num_steps)
        STEP_BUSY_SECONDS.inc(result.step_s)
        STEP_IDLE_SECONDS.inc(result.idle_s)
        if self._is_home(peer):
            self._load = self._engine.num_running
        self._note_load()

    def _note_progress(self, text: str, fraction: float) -> None:
        """Runs on the step thread."""
        self._progress = f"{text} {fraction:.0%}"
        if self._progress_lines.is_due(time.monotonic()):
            log.info("%s", self._progress)

    def _note_load(self) -> None:
        SEQUENCES.set(self._load)
        if self._is_draining and self._load == self._num_pending == 0:
            self._idle.set()

    def _busy_s(self) -> float:
        """Seconds since the last progress while a step is due."""
        return time.monotonic() - self._last_progress_s if self._num_pending else 0.0

    @property
    def _hangs(self) -> bool:
        return self._busy_s() > self._config.stall_s

    async def _watch_steps(self) -> None:
        """A hanging step thread cannot be stopped, so the process ends and is restarted."""
        while True:
            await asyncio.sleep(WATCH_S)
            if self._busy_s() > 2 * self._config.stall_s:
                raise RuntimeError(f"no step has finished for {self._busy_s():.0f} s")


def _has_first_tokens(plan: StepPlan, output: Future[StepOutput]) -> bool:
    """True if a sequence with a prefill chunk in this plan has a sampled token."""
    if output.exception() is not None:
        return False
    slots = {chunk.slot for chunk in plan.prefill}
    result, _ = output.result()
    outputs = (row for row in result.rows if row.run.kind == RunKind.OUTPUT)
    return any(row.run.num_tokens and row.slot in slots for row in outputs)


class _Stay(NamedTuple):
    request: str
    attempt: int
    num_steps_before: int


class SlotLog:
    """The sequences in slots according to the plans. A logged sequence may come back, to this
    worker or another."""

    def __init__(self) -> None:
        self._stays: dict[int, _Stay] = {}
        self._num_steps = 0

    def note(self, plan: StepPlan) -> None:
        for slot in plan.release:
            self._leave(slot)
        for row in plan.admit:
            self._stays[row.slot] = _Stay(row.request, row.attempt, self._num_steps)
        self._num_steps += plan.num_steps

    def clear(self) -> None:
        """The scheduler is lost, and all slots are free."""
        for slot in list(self._stays):
            self._leave(slot)

    def _leave(self, slot: int) -> None:
        stay = self._stays.pop(slot)
        log_end(
            "sequence left its slot",
            stay.request,
            attempt=stay.attempt,
            slot=slot,
            num_steps=self._num_steps - stay.num_steps_before,
        )

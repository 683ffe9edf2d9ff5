"""The scheduler as a process: messages in, the pure core, messages out."""

import asyncio
import logging
import time
from itertools import count, groupby

import numpy as np

from services.scheduler.emission import Emission
from services.scheduler.forwarding import Forwarding
from services.scheduler.intake import Intake
from services.scheduler.metrics import (
    STALLED_WORKERS,
    CoreMetrics,
    StepMetrics,
)
from services.scheduler.prefills import PrefillLimits
from services.scheduler.registration import why_refused
from services.scheduler.request_log import RequestLog
from services.scheduler.result_check import check_result
from services.scheduler.scheduler import Refusal, Scheduler
from services.scheduler.sequence import Sequence
from services.scheduler.watchdog import LOOK_S, Watchdog
from shared.admin import Command
from shared.codec import Array
from shared.config.scheduler import SchedulerConfig
from shared.errors import (
    NO_WORKER,
    RETRY_AFTER_S,
    WORKER_DIED,
    RequestError,
    Unavailable,
)
from shared.keys import load_keys
from shared.link import Link
from shared.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    Cancel,
    Credit,
    Generate,
    Grant,
    Heartbeat,
    Hello,
    Message,
    Release,
    RequestKey,
    State,
    StepResult,
)
from shared.peer import Peer
from shared.token_arrays import Layout, TokenArrays

log = logging.getLogger(__name__)

LOOK_ROUND_S = 1.0  # after which tokenizers that are stopped together with us have said so


class SchedulerService:
    """Binds one socket for tokenizers and one for workers; plans whenever something changed."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "scheduler", config.instance)
        self._link = Link(hello, self, load_keys(config.keys, "scheduler"))
        self._core = Scheduler(
            config.max_waiting,
            config.priority_step_s,
            config.enable_prefix_caching,
            config.pipeline_depth,
            PrefillLimits(
                config.max_num_partial_prefills,
                config.max_long_partial_prefills,
                config.long_prefill_token_threshold,
            ),
        )
        self._intake = Intake(self._core, config.quarantine_s)
        self._metrics = CoreMetrics(self._core)
        self._log = RequestLog()
        self._steps = StepMetrics(self._core)
        self._watchdog = Watchdog(self._core.workers)
        self._routes: dict[int, Forwarding] = {}  # to tokenizers
        self._workers: dict[str, Peer] = {}
        self._new_ids = count()
        self._num_steps = 0
        self._is_planning_due = False
        self._is_draining = False
        self._idle = asyncio.Event()

    async def run(self) -> None:
        directory, tcp = self._config.mesh_dir, self._config.listen_address
        try:
            self._link.listen(directory, "tokenizer", role="tokenizers", tcp=tcp)
            self._link.listen(directory, "worker", role="workers", tcp=tcp)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch_workers())
                await self._link.run()
        finally:
            for forwarding in self._routes.values():
                forwarding.flush()
            await self._link.close("the scheduler leaves", is_planned=self._is_draining)

    async def _watch_workers(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            for worker_id in self._watchdog.look():
                STALLED_WORKERS.inc()
                step = self._core.workers[worker_id].in_flight[0].step
                self._link.drop(self._workers[worker_id], f"step {step} brings no result (stall-s)")

    async def drain(self) -> None:
        """Returns soon, so that gateways replay what is open here through the next scheduler. Only
        where all tokenizers leave too, and none of them would, everything ends here first."""
        self._is_draining = True
        if self._routes:
            await asyncio.sleep(LOOK_ROUND_S)
        states = [forwarding.peer.status.state for forwarding in self._routes.values()]
        if all(state == State.DRAINING for state in states):
            self._plan_soon()
            await self._idle.wait()

    def commands(self) -> dict[str, Command]:
        return {"reset_prefix_cache": self._core.reset_prefix_cache}

    def status(self) -> Heartbeat:
        state, reason = self._state()
        overview = self._metrics.overview(self._config.instance)
        num_open = len(self._core.sequences)
        return Heartbeat(state, reason, num_open, self._num_steps, overview=overview)

    def _state(self) -> tuple[State, str]:
        if any(worker.is_ready for worker in self._workers.values()):
            return State.READY, ""
        reasons = [worker.status.reason for worker in self._workers.values()]
        return State.NOT_READY, reasons[0] if reasons else "no worker is connected"

    def refusal(self, hello: Hello) -> str | None:
        return why_refused(hello, (peer.hello for peer in self._link.peers))

    def on_up(self, peer: Peer) -> None:
        new_id = next(self._new_ids)
        if peer.hello.service == "tokenizer":
            self._routes[new_id] = Forwarding(peer, self._config.forward_interval_s)
        elif peer.hello.capacity is not None:
            worker_id = f"{peer.hello.instance}/{new_id}"
            self._workers[worker_id] = peer
            self._core.add_worker(worker_id, peer.hello.capacity)
        self._plan_soon()

    def on_down(self, peer: Peer, reason: str) -> None:
        if (route := self._route_of(peer)) is not None:
            self._routes.pop(route).drop()
            self._core.cancel_route(route)
        if (worker_id := self._worker_id_of(peer)) is not None:
            del self._workers[worker_id]
            self._steps.forget(worker_id)
            now_s = time.monotonic()
            self._refuse(self._core.remove_worker(worker_id, now_s, is_explained=peer.is_explained))
            loop = asyncio.get_running_loop()
            loop.call_later(self._config.worker_grace_s, self._fail_unservable, now_s)
        self._plan_soon()

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message, peer.hello.service:
            case StepResult(), "worker":
                self._absorb(peer, message, TokenArrays(*arrays))
                return
            case Generate(), "tokenizer":
                self._add(peer, message, *arrays)
            case Cancel(keys), "tokenizer":
                for key in keys:
                    if self._owns(peer, key):
                        self._core.cancel((key.request, key.attempt))
            case Credit(grants), "tokenizer":
                for grant in grants:
                    if self._owns(peer, grant):
                        self._core.grant(grant)
            case Release(), "worker":
                worker_id = self._worker_id_of(peer)
                assert worker_id is not None
                self._core.release_worker(worker_id)
            case _:
                log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
        self._plan_soon()

    def _route_of(self, peer: Peer) -> int | None:
        routes = self._routes.items()
        return next((route for route, forwarding in routes if forwarding.peer is peer), None)

    def _worker_id_of(self, peer: Peer) -> str | None:
        return next((name for name, each in self._workers.items() if each is peer), None)

    def _owns(self, peer: Peer, named: RequestKey | Grant) -> bool:
        """Whether a sequence is this tokenizer's."""
        sequence = self._core.sequences.get((named.request, named.attempt))
        return sequence is not None and sequence.route == self._route_of(peer)

    def _add(self, peer: Peer, generate: Generate, prompt: np.ndarray, emitted: np.ndarray) -> None:
        route = self._route_of(peer)
        assert route is not None
        try:
            self._intake.add(generate, prompt, emitted, route, time.monotonic())
        except RequestError as error:
            peer.send(error.to_failed(generate.request, generate.attempt))
            self._log.refuse(generate, error)
        else:
            peer.send(Accepted(generate.request, generate.attempt), prompt[:0])

    def _absorb(self, peer: Peer, result: StepResult, arrays: TokenArrays) -> None:
        worker_id = self._worker_id_of(peer)
        assert worker_id is not None
        layout = Layout(result.rows, arrays)
        check_result(self._core.workers[worker_id], result, arrays)
        emissions = self._core.absorb(worker_id, result, arrays)
        self._plan_for(worker_id, peer)  # first of all: the worker idles until it has a plan
        self._num_steps += 1
        self._steps.end(worker_id, result, time.monotonic())
        for route, group in groupby(emissions, key=lambda each: each.sequence.route):
            self._forward(route, list(group), layout)
        self._account()
        if self._core.may_change_other_plans:
            self._plan_soon()

    def _refuse(self, refusals: list[Refusal]) -> None:
        for refusal in refusals:
            if refusal.error.code == WORKER_DIED:
                self._intake.quarantine(refusal.sequence, time.monotonic())
            self._fail(refusal.sequence, refusal.error)

    def _forward(self, route: int, emissions: list[Emission], layout: Layout) -> None:
        self._routes[route].add(emissions, layout)
        for emission in emissions:
            if emission.error is not None:
                self._fail(emission.sequence, emission.error)

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        forwarding = self._routes.get(sequence.route)
        if forwarding is not None:
            forwarding.flush()
            forwarding.peer.send(error.to_failed(*sequence.key))

    def _plan_soon(self) -> None:
        """Plans once for everything that arrives in this turn of the loop."""
        if not self._is_planning_due:
            self._is_planning_due = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        self._is_planning_due = False
        for worker_id, peer in self._workers.items():
            self._plan_for(worker_id, peer)
        self._account()

    def _account(self) -> None:
        """Brings metrics, request log and the event that ``drain`` waits for up to date."""
        if self._core.sequences:
            self._idle.clear()
        else:
            self._idle.set()
        self._metrics.count()
        if all_ended := self._core.take_ended():
            now_s = time.monotonic()
            self._intake.note_ends(len(all_ended), now_s)
            for ended in all_ended:
                self._log.end(ended, now_s)

    def _plan_for(self, worker_id: str, peer: Peer) -> None:
        """Sends as many plans as may be in flight at once."""
        admits = peer.status.state != State.DRAINING
        started_s = time.monotonic()
        while planned := self._core.plan(worker_id, admits):
            planned_s = time.monotonic()
            peer.send(planned.plan, planned.ids)
            self._log.begin(planned.newcomers, planned_s)
            self._steps.begin(worker_id, planned, started_s, planned_s)
            started_s = time.monotonic()

    def _fail_unservable(self, lost_s: float) -> None:
        """Ends the sequences that no worker could run since a worker was lost at ``lost_s``,
        ``worker_grace_s`` ago."""
        waited = f"within {self._config.worker_grace_s:g} s (worker-grace-s)"
        text = f"the worker of this request was lost, and no other that can run it came {waited}"
        error = Unavailable(text, code=NO_WORKER, retry_after_s=RETRY_AFTER_S)
        self._refuse(self._core.fail_unservable(lost_s, error))
        self._plan_soon()

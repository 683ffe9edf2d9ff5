"""The scheduler process: messages in, the pure core, messages out."""

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import count, groupby

import numpy as np
from msgspec.structs import replace

from services.scheduler.adapters.cell import CellAdapters
from services.scheduler.cells.handover import CellHandover
from services.scheduler.extension import Cell, CellExtension, Observer, OtherCells
from services.scheduler.intake import Intake, why_refused
from services.scheduler.media.cell import CellMedia
from services.scheduler.metrics import STALLED_WORKERS, CoreMetrics, RequestLog, StepMetrics
from services.scheduler.moves.cell import CellMoves
from services.scheduler.prefills import PrefillLimits
from services.scheduler.promises.cell import CellPromises
from services.scheduler.quarantine.cell import CellQuarantine
from services.scheduler.results import Emission, check_result
from services.scheduler.scheduler import Refusal, Scheduler
from services.scheduler.sequence import Arrival, Sequence, instance_of
from services.scheduler.stores.cell import CellStores
from services.scheduler.tokens_message import Forwarding
from services.scheduler.traces.sequence_spans import SequenceSpans
from services.scheduler.worker_state import LOOK_S, Watchdog
from shared.errors import NO_WORKER, RETRY_AFTER_S, CodecError, RequestError, Unavailable
from shared.link.extension import is_taken
from shared.link.keys import load_keys
from shared.link.link import Link
from shared.link.peer import Peer
from shared.process.admin import Command
from shared.process.report import Inquiries, check_own, make_report
from shared.settings.scheduler import SchedulerConfig
from shared.wire.codec import Array
from shared.wire.messages import (
    CELLS_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    Attach,
    Cancel,
    Credit,
    Detach,
    Generate,
    Grant,
    Heartbeat,
    Hello,
    Inquire,
    Message,
    Release,
    RequestKey,
    ServiceReport,
    SpanReport,
    State,
    Stats,
    StepResult,
)
from shared.wire.token_arrays import Layout, TokenArrays

log = logging.getLogger(__name__)

FORWARD_INTERVAL_S = 0.01  # tokens of several steps share a message; first ones and ends go at once
HANDOVER_SHARE = 1 / 2  # of drain-timeout-s
LOOK_ROUND_S = 1.0  # time for tokenizers stopped together with us to report it

OBSERVERS: tuple[type[Observer], ...] = (
    SequenceSpans,
    Observer,
)
"""The first one is used."""
CELLS: tuple[type[OtherCells], ...] = (
    CellHandover,
    OtherCells,
)
"""The first one is used."""
EXTENSIONS: list[Callable[[Cell], CellExtension]] = [
    CellAdapters,
    CellMedia,
    CellStores,
    CellMoves,
    CellPromises,
    CellQuarantine,
]


class SchedulerService:
    """Binds one socket for tokenizers and one for workers, and plans after every change.

    It forms a cell with its attached workers; there may be others.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        hello = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "scheduler", config.instance)
        self._link = Link(hello, self, load_keys(config.keys, "scheduler"))
        self._core = Scheduler(
            max_waiting=config.max_waiting,
            priority_step_s=config.priority_step_s,
            caches_prefixes=config.enable_prefix_caching,
            pipeline_depth=config.pipeline_depth,
            prefill_limits=PrefillLimits(
                config.max_num_partial_prefills,
                config.max_long_partial_prefills,
                config.long_prefill_token_threshold,
            ),
            priority_share=config.later_priority_share,
            stream_rate=config.min_stream_rate,
        )
        self._intake = Intake(self._core)
        self._metrics = CoreMetrics(self._core)
        self._log = RequestLog()
        now_s = time.monotonic()
        self._observer = OBSERVERS[0](self._core, config.instance, self._send_report, now_s)
        self._steps = StepMetrics(self._core)
        self._watchdog = Watchdog(self._core.workers)
        self._routes: dict[int, Forwarding] = {}  # one per tokenizer
        self._workers: dict[str, Peer] = {}  # attached ones
        self._worker_ids: dict[Peer, str] = {}
        others = self._core, self._routes, config.instance, self._plan_soon
        self._other_cells = CELLS[0](*others)
        cell = Cell(
            config=config,
            core=self._core,
            workers=self._workers,
            others=self._other_cells,
            on_fits=self._note_fits,
            ends=self._intake.ends,
        )
        self._extensions = [make(cell) for make in EXTENSIONS]
        self._inquiries = Inquiries()
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
                self._link.drop(self._workers[worker_id], f"step {step} has no result (stall-s)")
            self._core.pass_time(LOOK_S)
            self._other_cells.hand_over(self._core.unrunnable)
            self._other_cells.move_waiting(time.monotonic())
            for each in self._extensions:
                each.look(time.monotonic())

    async def drain(self) -> None:
        """Hands all sequences over to other cells. If there are none it returns soon, and gateways
        replay the sequences through the next scheduler. If all tokenizers drain too, no one could
        replay them, so it waits for their end."""
        self._is_draining = True
        self._link.send_status()
        if self._routes:
            await asyncio.sleep(LOOK_ROUND_S)
        states = [forwarding.peer.status.state for forwarding in self._routes.values()]
        if all(state == State.DRAINING for state in states):
            self._plan_soon()
            await self._idle.wait()
        else:
            within_s = HANDOVER_SHARE * self._config.drain_timeout_s
            end_s = time.monotonic() + within_s
            for each in self._extensions:
                await each.leave(within_s / 2)
            await self._other_cells.hand_over_all(end_s - time.monotonic())

    def commands(self) -> dict[str, Command]:
        return {"reset_prefix_cache": self._reset_prefix_cache}

    def _reset_prefix_cache(self) -> None:
        self._core.reset_prefix_cache()
        for each in self._extensions:
            each.reset_prefix_cache()
        self._plan_soon()

    def status(self) -> Heartbeat:
        state, reason = self._state()
        overview = replace(
            self._metrics.overview(self._config.instance),
            is_leaving=self._is_draining,
            spare=self._spare_worker(),
            is_ready=state == State.READY,
        )
        num_open = len(self._core.sequences)
        return Heartbeat(state, reason, num_open, self._num_steps, overview=overview)

    def _spare_worker(self) -> str:
        """The newest worker that can move to another cell, or empty while one is leaving."""
        if any(worker.status.state == State.DRAINING for worker in self._workers.values()):
            return ""
        names = [each.hello.instance for each in self._workers.values() if _can_move(each)]
        return names[-1] if names else ""

    def _state(self) -> tuple[State, str]:
        if any(worker.is_ready for worker in self._workers.values()):
            return State.READY, ""
        if self.stands_by:
            return State.NOT_READY, "stands by: other schedulers have the workers"
        reasons = [worker.status.reason for worker in self._workers.values()]
        return State.NOT_READY, reasons[0] if reasons else "no worker is connected"

    @property
    def stands_by(self) -> bool:
        """True if it has no worker but ready ones are connected, which attach here if they lose
        their scheduler."""
        workers = (peer for peer in self._link.peers if peer.hello.service == "worker")
        return not self._workers and any(worker.is_ready for worker in workers)

    def refusal(self, hello: Hello) -> str | None:
        return why_refused(hello, (peer.hello for peer in self._link.peers))

    def on_up(self, peer: Peer) -> None:
        if peer.hello.service == "tokenizer":
            self._routes[next(self._new_ids)] = Forwarding(peer, FORWARD_INTERVAL_S)
        else:
            peer.on_state = partial(self._note_state, peer)
            if peer.stood_still:
                self._core.forgive(peer.hello.instance)
            if not _can_move(peer):
                self._attach(peer)
        for each in self._extensions:
            each.on_up(peer)
        self._plan_soon()

    def _attach(self, worker: Peer) -> None:
        """Raises CodecError for a worker that is attached already."""
        if self._worker_id_of(worker) is not None:
            raise CodecError("it is attached already")
        capacity = worker.hello.capacity
        assert capacity is not None
        worker_id = f"{worker.hello.instance}/{next(self._new_ids)}"
        self._workers[worker_id] = worker
        self._worker_ids[worker] = worker_id
        found = [each.resource_of(worker) for each in self._extensions]
        resources = [each for each in found if each is not None]
        self._core.add_worker(worker_id, capacity, worker.status.num_steps, resources)
        for each in self._extensions:
            each.on_attach(worker)
        self._note_state(worker)

    def _note_state(self, worker: Peer) -> None:
        if (worker_id := self._worker_id_of(worker)) is not None:
            self._core.note_state(worker_id, worker.is_ready)
        self._plan_soon()

    def _detach(self, worker_id: str, is_explained: bool) -> None:
        worker = self._workers.pop(worker_id)
        del self._worker_ids[worker]
        self._steps.forget(worker_id)
        self._refuse(self._core.remove_worker(worker_id, time.monotonic(), is_explained))
        for each in self._extensions:
            each.on_detach(worker)
        self._note_fits()

    def _note_fits(self) -> None:
        """Sequences that no worker can run any more go to other cells, or wait for a worker."""
        now_s = time.monotonic()
        self._core.note_fits(now_s)
        self._other_cells.hand_over(self._core.unrunnable)
        loop = asyncio.get_running_loop()
        loop.call_later(self._config.worker_grace_s, self._fail_unservable, now_s)
        self._plan_soon()

    def on_down(self, peer: Peer, reason: str) -> None:
        if (route := self._route_of(peer)) is not None:
            self._routes.pop(route).drop()
            self._core.cancel_route(route)
        if (worker_id := self._worker_id_of(peer)) is not None:
            self._detach(worker_id, peer.is_explained)
        for each in self._extensions:
            each.on_down(peer)
        self._plan_soon()

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message, peer.hello.service:
            case StepResult(), "worker":
                self._absorb(peer, message, TokenArrays(*arrays))
                return
            case Inquire(), "tokenizer":
                self._inquiries.ask(peer, self._workers.values(), time.monotonic())
                stats = self._metrics.stats()
                peer.send(make_report(self._link, stats, self._stats_of, self._is_of_cell))
                return
            case ServiceReport(), "worker":
                check_own(peer, message)
                self._inquiries.pass_on(message, time.monotonic())
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
            case Attach(), "worker":
                self._attach(peer)
                self._link.send_status(only_changes=True)
            case Detach(), "worker":
                self._detach(self._attached(peer), is_explained=True)
                self._link.send_status(only_changes=True)
            case Release(), "worker":
                self._core.release_worker(self._attached(peer))
            case _ if not is_taken(self._extensions, peer, message, arrays):
                log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
        self._plan_soon()

    def _route_of(self, peer: Peer) -> int | None:
        return next((route for route, each in self._routes.items() if each.peer is peer), None)

    def _worker_id_of(self, peer: Peer) -> str | None:
        return self._worker_ids.get(peer)

    def _attached(self, worker: Peer) -> str:
        """Returns the worker's id. Raises CodecError for a worker that is not attached."""
        if (worker_id := self._worker_id_of(worker)) is None:
            raise CodecError("it is not attached")
        return worker_id

    def _is_of_cell(self, peer: Peer) -> bool:
        return peer.hello.service != "worker" or self._worker_id_of(peer) is not None

    def _stats_of(self, peer: Peer) -> Stats:
        worker_id = self._worker_id_of(peer)
        return {} if worker_id is None else self._steps.stats(worker_id, time.monotonic())

    def _owns(self, peer: Peer, named: RequestKey | Grant) -> bool:
        """True if the sequence belongs to this tokenizer."""
        sequence = self._core.sequences.get((named.request, named.attempt))
        return sequence is not None and sequence.route == self._route_of(peer)

    def _add(
        self,
        peer: Peer,
        generate: Generate,
        prompt: np.ndarray,
        emitted: np.ndarray,
        *pixels: np.ndarray,
    ) -> None:
        route = self._route_of(peer)
        assert route is not None
        arrival = Arrival(
            generate=generate,
            prompt=prompt,
            emitted=emitted,
            route=route,
            now_s=time.monotonic(),
            pixels=pixels,
        )
        try:
            for each in self._extensions:
                each.check(arrival)
            self._intake.check(arrival)
            for each in self._extensions:
                each.check_valid(arrival)
            self._intake.add(arrival)
        except RequestError as error:
            peer.send(error.to_failed(generate.request, generate.attempt))
            self._log.refuse(generate, error)
        else:
            peer.send(Accepted(generate.request, generate.attempt), prompt[:0])
            self._observer.begin(arrival)

    def _absorb(self, peer: Peer, result: StepResult, arrays: TokenArrays) -> None:
        worker_id = self._attached(peer)
        layout = Layout(result.rows, arrays)
        check_result(self._core.workers[worker_id], result, arrays)
        emissions = self._core.absorb(worker_id, result, arrays)
        self._plan_for(worker_id, peer)  # first of all: the worker idles until it has a plan
        self._num_steps += result.num_steps
        now_s = time.monotonic()
        self._steps.end(worker_id, result, now_s)
        for report in result.spans:
            self._observer.forward(report)
        for each in self._extensions:
            each.note(emissions, now_s)
        for route, group in groupby(emissions, key=lambda each: each.sequence.route):
            self._forward(route, list(group), layout)
        self._account()
        if self._core.may_change_other_plans:
            self._plan_soon()

    def _send_report(self, route: int, report: SpanReport) -> None:
        if (forwarding := self._routes.get(route)) is not None:
            forwarding.add_spans(report)

    def _refuse(self, refusals: list[Refusal]) -> None:
        for refusal in refusals:
            for each in self._extensions:
                each.fail(refusal.sequence, refusal.error, time.monotonic())
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
        for worker_id in self._core.workers_in_need:
            self._plan_for(worker_id, self._workers[worker_id])
        self._account()

    def _account(self) -> None:
        """Updates metrics, request log and the event that ``drain`` waits for."""
        if self._core.sequences:
            self._idle.clear()
        else:
            self._idle.set()
        self._metrics.count()
        now_s = time.monotonic()
        self._observer.account(now_s)
        if all_ended := self._core.take_ended():
            self._intake.ends.note(len(all_ended), now_s)
            for ended in all_ended:
                self._log.end(ended, now_s)
                for each in self._extensions:
                    each.end(ended, now_s)
                self._observer.end(ended, now_s)

    def _plan_for(self, worker_id: str, peer: Peer) -> None:
        """Sends plans up to the most that may be in flight. An idle worker starts with the first
        while the others are made."""
        worker = self._core.workers[worker_id]
        is_idle = not worker.in_flight
        started_s = time.monotonic()
        while planned := self._core.plan(worker_id):
            planned_s = time.monotonic()
            peer.send(planned.plan, planned.ids, *planned.pixels)
            self._observer.admit(instance_of(worker_id), planned.plan, planned_s)
            self._log.begin(planned.newcomers, planned_s)
            self._steps.begin(worker_id, planned, started_s, planned_s)
            if is_idle and self._core.planner.is_in_need(worker):
                self._plan_soon()  # after this one is sent
                return
            started_s = time.monotonic()

    def _fail_unservable(self, lost_s: float) -> None:
        """Ends the sequences that no worker could run since ``lost_s``, ``worker_grace_s`` ago,
        when a worker was lost."""
        waited = f"within {self._config.worker_grace_s:g} s (worker-grace-s)"
        text = f"the worker of this request was lost, and no other that can run it came {waited}"
        error = Unavailable(text, code=NO_WORKER, retry_after_s=RETRY_AFTER_S)

        def error_of(sequence: Sequence) -> RequestError:
            reasons = (each.why_unservable(sequence) for each in self._extensions)
            return next(filter(None, reasons), error)

        self._refuse(self._core.fail_unservable(lost_s, error_of))
        self._plan_soon()


def _can_move(worker: Peer) -> bool:
    """True if it knows several schedulers and attaches to one of them itself."""
    return worker.hello.minor >= CELLS_MINOR

"""The scheduler as a process: messages in, the pure core, messages out."""

import asyncio
import logging
import time
from itertools import count, groupby
from typing import TypeVar

import numpy as np

from services.scheduler.forward import tokens_of
from services.scheduler.metrics import CoreMetrics, StepMetrics
from services.scheduler.prefills import PrefillLimits
from services.scheduler.request_log import RequestLog
from services.scheduler.scheduler import Refusal, Scheduler
from services.scheduler.sequence import Emission, Sequence
from shared.admin import Command
from shared.codec import Array
from shared.config import SchedulerConfig
from shared.errors import RETRY_AFTER_S, InternalError, Overloaded, RequestError, Unavailable
from shared.keys import load_keys
from shared.link import Link
from shared.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Accepted,
    Cancel,
    Credit,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Release,
    State,
    StepResult,
)
from shared.peer import Peer
from shared.rate import Rate
from shared.token_arrays import Layout, TokenArrays

log = logging.getLogger(__name__)

Key = TypeVar("Key", int, str)


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
        self._ends = Rate()
        self._metrics = CoreMetrics(self._core)
        self._log = RequestLog()
        self._steps = StepMetrics(self._core)
        self._routes: dict[int, Peer] = {}  # tokenizers
        self._workers: dict[str, Peer] = {}
        self._new_ids = count()
        self._num_steps = 0
        self._is_draining = self._is_planning_due = False
        self._idle = asyncio.Event()
        self._grace: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        directory, tcp = self._config.mesh_dir, self._config.listen_address
        try:
            self._link.listen(directory, "tokenizer", role="tokenizers", tcp=tcp)
            self._link.listen(directory, "worker", role="workers", tcp=tcp)
            await self._link.run()
        finally:
            await self._link.close("the scheduler leaves")

    async def drain(self) -> None:
        self._is_draining = True
        self._link.tell_status()
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
        if self._is_draining:
            return State.DRAINING, "finishing what is open"
        if any(worker.is_ready for worker in self._workers.values()):
            return State.READY, ""
        reasons = [worker.status.reason for worker in self._workers.values()]
        return State.NOT_READY, reasons[0] if reasons else "no worker is connected"

    def refusal(self, hello: Hello) -> str | None:
        if hello.model is None or (hello.service == "worker" and hello.capacity is None):
            return "Hello lacks the model or the capacity"
        others = {peer.hello.model.fingerprint for peer in self._link.peers if peer.hello.model}
        if others - {hello.model.fingerprint}:
            return f"model {hello.model.fingerprint} where the mesh serves {others.pop()}"
        return None

    def on_up(self, peer: Peer) -> None:
        new_id = next(self._new_ids)
        if peer.hello.service == "tokenizer":
            self._routes[new_id] = peer
        elif peer.hello.capacity is not None:
            worker_id = f"{peer.hello.instance}/{new_id}"
            self._workers[worker_id] = peer
            self._refuse(self._core.add_worker(worker_id, peer.hello.capacity))
            self._end_grace()
        self._plan_soon()

    def on_down(self, peer: Peer, reason: str) -> None:
        for route in _keys(self._routes, peer):
            del self._routes[route]
            self._core.cancel_route(route)
        for worker_id in _keys(self._workers, peer):
            del self._workers[worker_id]
            self._steps.forget(worker_id)
            self._refuse(self._core.remove_worker(worker_id))
            self._begin_grace()
        self._plan_soon()

    def on_message(self, peer: Peer, message: Message, arrays: list[Array]) -> None:
        match message, peer.hello.service:
            case StepResult(), "worker":
                self._absorb(peer, message, TokenArrays(*arrays))
            case Generate(), "tokenizer":
                self._add(peer, message, arrays[0])
            case Cancel(keys), "tokenizer":
                for key in keys:
                    self._core.cancel((key.request, key.attempt))
            case Credit(grants), "tokenizer":
                for grant in grants:
                    self._core.grant(grant)
            case Release(), "worker":
                (worker_id,) = _keys(self._workers, peer)
                self._core.release_worker(worker_id)
            case _:
                log.warning("%s sent a %s, which is not for us", peer, type(message).__name__)
        self._plan_soon()

    def _add(self, peer: Peer, generate: Generate, ids: np.ndarray) -> None:
        (route,) = _keys(self._routes, peer)
        now_s = time.monotonic()
        if not self._core.sequences:
            self._ends.start(now_s)
        try:
            self._core.add(generate, ids, route, now_s)
        except RequestError as error:
            if isinstance(error, Overloaded):
                error.retry_after_s = self._ends.retry_after_s(len(self._core.waiting), now_s)
            peer.send(error.to_failed(generate.request, generate.attempt))
            self._log.refuse(generate, error)
        else:
            peer.send(Accepted(generate.request, generate.attempt), ids[:0])

    def _absorb(self, peer: Peer, result: StepResult, arrays: TokenArrays) -> None:
        (worker_id,) = _keys(self._workers, peer)
        layout = Layout(result.rows, arrays)
        emissions = self._core.absorb(worker_id, result, arrays)
        self._plan_for(worker_id, peer)  # first of all: the worker idles until it has a plan
        self._num_steps += 1
        self._steps.end(worker_id, result, time.monotonic())
        self._ends.note(sum(each.ends for each in emissions), time.monotonic())
        for route, group in groupby(emissions, key=lambda each: each.sequence.route):
            self._forward(route, list(group), layout)

    def _refuse(self, refusals: list[Refusal]) -> None:
        for refusal in refusals:
            self._fail(refusal.sequence, refusal.error)

    def _forward(self, route: int, emissions: list[Emission], layout: Layout) -> None:
        tokens, arrays = tokens_of(emissions, layout)
        self._routes[route].send(tokens, *arrays)
        for emission in emissions:
            if emission.row.error is not None:
                self._fail(emission.sequence, InternalError(emission.row.error))

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        peer = self._routes.get(sequence.route)
        if peer is not None:
            peer.send(error.to_failed(*sequence.key))

    def _plan_soon(self) -> None:
        """Plans once for everything that arrives in this turn of the loop."""
        if not self._is_planning_due:
            self._is_planning_due = True
            asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        self._is_planning_due = False
        if self._core.sequences:
            self._idle.clear()
        else:
            self._idle.set()
        for worker_id, peer in self._workers.items():
            self._plan_for(worker_id, peer)
        self._metrics.count()
        for ended in self._core.take_ended():
            self._log.end(ended, time.monotonic())

    def _plan_for(self, worker_id: str, peer: Peer) -> None:
        """As many plans as may be in flight at once."""
        admits = peer.status.state != State.DRAINING
        started_s = time.monotonic()
        while planned := self._core.plan(worker_id, admits):
            planned_s = time.monotonic()
            peer.send(planned.plan, planned.ids)
            self._log.begin(planned.newcomers, planned_s)
            self._steps.begin(worker_id, planned, started_s, planned_s)
            started_s = time.monotonic()

    def _begin_grace(self) -> None:
        if not self._workers and self._grace is None:
            loop = asyncio.get_running_loop()
            self._grace = loop.call_later(self._config.worker_grace_s, self._abandon)

    def _end_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None

    def _abandon(self) -> None:
        self._grace = None
        waited = f"no worker came back within {self._config.worker_grace_s:g} s (worker-grace-s)"
        for sequence in self._core.abandon_waiting():
            self._fail(sequence, Unavailable(waited, code="no_worker", retry_after_s=RETRY_AFTER_S))
        self._plan_soon()


def _keys(peers: dict[Key, Peer], peer: Peer) -> list[Key]:
    """The key of ``peer``, or none."""
    return [key for key, each in peers.items() if each is peer]

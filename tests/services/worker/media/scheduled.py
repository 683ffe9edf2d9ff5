"""Chats under the scheduler's own core, with prefix hits and preemption."""

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np
from msgspec.structs import replace

from benchmarks.harness.scheduled import UNLIMITED_BYTES, Run
from benchmarks.harness.sequences import generate_one
from services.scheduler.media.cell import EncodingRoom, note_encoded
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.sequence import Arrival
from services.scheduler.worker_state import PROBATION_STEPS
from services.worker.engine.protocol import StepOutput
from services.worker.media.addition import Media
from shared.wire.messages import Grant, SamplingParams
from shared.wire.token_arrays import Layout
from tests.services.worker.media.gates import WAIT_S
from tests.services.worker.media.prompts import Chat

MOST = 1000  # may await images at once
Report = tuple[str, int, int]  # request, attempt, and the ids that may be computed


def run(engine: Any, chats: Sequence[Chat], params: Sequence[SamplingParams]) -> Run:
    core, done = Scheduler(1000, 10, True, 2), Run.of(len(chats))
    room = EncodingRoom(replace(engine.capacity, max_num_seqs=MOST))
    core.add_worker("w", engine.capacity, PROBATION_STEPS, [room])
    reports = _reports_of(engine)
    for number, (chat, of_chat) in enumerate(zip(chats, params, strict=True)):
        core.add(_arrival(str(number), chat, of_chat))
        core.grant(Grant(str(number), 1, engine.capacity.max_model_len, UNLIMITED_BYTES))
    in_flight: deque[Future[StepOutput]] = deque()
    while core.sequences:
        _note(core, [reports.get() for _ in range(reports.qsize())])
        while (planned := _plan(core)) is not None:
            done.note_plan(planned.plan)
            in_flight.append(Future())
            engine.submit(planned.plan, planned.ids, in_flight[-1], planned.pixels)
        if not in_flight:
            _note(core, [reports.get(timeout=WAIT_S)])
            continue
        result, arrays = in_flight.popleft().result()
        layout = Layout(result.rows, arrays)
        for each in core.absorb("w", result, arrays):
            done.note(each.row, layout.part(each.index, each.index + 1))
    for output in in_flight:
        output.result()
    engine.reset()
    return done


def _reports_of(engine: Any) -> "SimpleQueue[Report]":
    (addition,) = (each for each in engine.additions if isinstance(each, Media))
    reports: SimpleQueue[Report] = SimpleQueue()
    addition.encoder.on_encoded = lambda *report: reports.put(report)
    return reports


def _arrival(name: str, chat: Chat, params: SamplingParams) -> Arrival:
    ids = np.array(chat.expected.prompt_ids, np.int32)
    generate = replace(generate_one(name, params), items=chat.items)
    pixels = [chat.pixels[digest] for digest in {each.digest: None for each in chat.items}]
    return Arrival(generate, ids, ids[:0], 0, 0.0, pixels)


def _plan(core: Scheduler) -> Planned | None:
    worker = core.workers["w"]
    worker.step_s = 0.0  # so that plans have their full length at any speed
    return core.plan("w")


def _note(core: Scheduler, reports: Iterable[Report]) -> None:
    for request, attempt, num_ids in reports:
        sequence = core.sequences.get((request, attempt))
        if sequence is not None and sequence.allocation is not None:
            note_encoded(sequence, num_ids)

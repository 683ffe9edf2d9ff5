"""Logs each sequence at its end, with times: the core has no clock."""

from services.scheduler.sequence import Ended, Sequence, instance_of
from shared.errors import RequestError
from shared.process.log import log_end
from shared.wire.messages import Generate

EVENT = "sequence ended"


class RequestLog:
    """Keeps the time each sequence waited for its first plan. Times are monotonic."""

    def __init__(self) -> None:
        self._queued_s: dict[tuple[str, int], float] = {}

    def refuse(self, generate: Generate, error: RequestError) -> None:
        for each in generate.sequences:
            log_end(EVENT, each.request, attempt=generate.attempt, reason=error.code)

    def begin(self, newcomers: list[Sequence], now_s: float) -> None:
        for sequence in newcomers:
            self._queued_s[sequence.key] = now_s - sequence.arrived_s

    def end(self, ended: Ended, now_s: float) -> None:
        sequence = ended.sequence
        worker_id = sequence.last_worker_id
        log_end(
            EVENT,
            sequence.request,
            attempt=sequence.attempt,
            reason=ended.reason,
            worker=instance_of(worker_id) if worker_id is not None else None,
            queued_s=self._queued_s.pop(sequence.key, now_s - sequence.arrived_s),
            num_preemptions=sequence.num_preemptions,
            num_worker_deaths=sequence.num_worker_deaths,
        )

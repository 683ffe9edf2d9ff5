"""What the log tells of a sequence when it ends. The clock that the core has not."""

from services.scheduler.sequence import Ended
from shared.errors import RequestError
from shared.log import log_end
from shared.messages import Admit, Generate

EVENT = "sequence ended"


class RequestLog:
    """Knows how long each sequence waited until it was planned first; times are monotonic."""

    def __init__(self) -> None:
        self._arrived_s: dict[tuple[str, int], float] = {}  # of those that wait
        self._queued_s: dict[tuple[str, int], float] = {}  # of those that were planned

    def refuse(self, generate: Generate, error: RequestError) -> None:
        log_end(EVENT, generate.request, attempt=generate.attempt, reason=error.code)

    def add(self, generate: Generate, now_s: float) -> None:
        self._arrived_s[generate.request, generate.attempt] = now_s

    def admit(self, rows: list[Admit], now_s: float) -> None:
        for row in rows:
            key = (row.request, row.attempt)
            arrived_s = self._arrived_s.pop(key, None)
            if arrived_s is not None:
                self._queued_s[key] = now_s - arrived_s

    def end(self, ended: Ended, now_s: float) -> None:
        sequence = ended.sequence
        arrived_s = self._arrived_s.pop(sequence.key, now_s)
        worker_id = sequence.last_worker_id
        log_end(
            EVENT,
            sequence.request,
            attempt=sequence.attempt,
            reason=ended.reason,
            worker=worker_id.rpartition("/")[0] if worker_id is not None else None,
            queued_s=self._queued_s.pop(sequence.key, now_s - arrived_s),
            num_preemptions=sequence.num_preemptions,
            num_worker_deaths=sequence.num_worker_deaths,
        )

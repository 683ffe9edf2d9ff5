"""The quarantine of requests that killed workers."""

import logging
from collections.abc import Iterable
from hashlib import blake2b
from math import ceil

import msgspec
import numpy as np
from prometheus_client import Counter

from services.scheduler.extension import Cell, CellExtension
from services.scheduler.sequence import Arrival, Sequence, Span
from shared.errors import QUARANTINED, WORKER_DIED, InvalidRequest, RequestError
from shared.process.log import client_text
from shared.wire.envelope import RequestOptions, hash_root
from shared.wire.messages import SamplingParams

log = logging.getLogger(__name__)

QUARANTINED_REQUESTS = Counter(
    "shoal_quarantined_requests", "Requests quarantined because workers died under them"
)
QUARANTINE_REFUSALS = Counter(
    "shoal_quarantine_refusals", "Sequences of quarantined requests that were refused"
)


class CellQuarantine(CellExtension):
    """Refuses requests equal to one under which workers died, for a while."""

    def __init__(self, cell: Cell) -> None:
        self._quarantine = Quarantine(cell.config.quarantine_s)

    def check_valid(self, arrival: Arrival) -> None:
        params, options, now_s = arrival.generate.params, arrival.options, arrival.now_s
        try:
            self._quarantine.check(arrival.prompt, params, options, now_s, arrival.spans)
        except InvalidRequest:
            QUARANTINE_REFUSALS.inc()
            raise

    def fail(self, sequence: Sequence, error: RequestError, now_s: float) -> None:
        if error.code != WORKER_DIED:
            return
        QUARANTINED_REQUESTS.inc()
        name = client_text(sequence.request)
        log.warning("workers died under request %s: it is quarantined", name)
        params, options = sequence.params, sequence.options
        self._quarantine.add(sequence.prompt, params, options, now_s, sequence.spans)


MAX_QUARANTINED = 1024


class Quarantine:
    """Requests under which workers died: each new attempt would kill two more. Times are monotonic.
    Pure.

    Requests are equal if their prompt with its items, parameters and ``hash_root`` are. The seed is
    left out, since it differs between attempts unless the client sets it, and so are prompt
    logprobs, since only the first choice asks for them. A new entry beyond ``MAX_QUARANTINED``
    replaces the oldest.
    """

    def __init__(self, quarantine_s: float) -> None:
        self._quarantine_s = quarantine_s
        self._until_s: dict[bytes, float] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._until_s)

    def add(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        options: RequestOptions,
        now_s: float,
        spans: Iterable[Span] = (),
    ) -> None:
        digest = _digest(prompt, params, options, spans)
        self._until_s.pop(digest, None)
        self._until_s[digest] = now_s + self._quarantine_s
        self._drop_old(now_s)

    def check(
        self,
        prompt: np.ndarray,
        params: SamplingParams,
        options: RequestOptions,
        now_s: float,
        spans: Iterable[Span] = (),
    ) -> None:
        """Raises InvalidRequest for a quarantined request."""
        self._drop_old(now_s)
        if not self._until_s:
            return
        until_s = self._until_s.get(_digest(prompt, params, options, spans))
        if until_s is None:
            return
        left_s = until_s - now_s
        raise InvalidRequest(
            "workers died while they ran this request, so it is not run again for"
            f" {ceil(left_s)} s (quarantine-s = {self._quarantine_s:g})",
            code=QUARANTINED,
            retry_after_s=left_s,
        )

    def _drop_old(self, now_s: float) -> None:
        for digest, until_s in list(self._until_s.items()):
            if until_s > now_s and len(self) <= MAX_QUARANTINED:
                return
            del self._until_s[digest]


def _digest(
    prompt: np.ndarray, params: SamplingParams, options: RequestOptions, spans: Iterable[Span]
) -> bytes:
    """``prompt`` [prompt_len] int32."""
    params = msgspec.structs.replace(params, seed=0, prompt_logprobs=None)
    items = [span.item for span in spans]
    header = hash_root(options) + msgspec.msgpack.encode((params, items))
    return blake2b(header + prompt.tobytes(), digest_size=16).digest()

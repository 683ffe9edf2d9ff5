"""What a Generate has to pass before its sequences wait."""

import logging

import numpy as np

from services.scheduler.generate_check import check_generate
from services.scheduler.metrics import QUARANTINE_REFUSALS, QUARANTINED_REQUESTS
from services.scheduler.quarantine import Quarantine
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence
from shared.errors import QUARANTINED, Overloaded, RequestError
from shared.process.log import client_text
from shared.process.rate import Rate
from shared.wire.messages import Generate

log = logging.getLogger(__name__)


class Intake:
    """Adds sequences to ``core``, or refuses them. Times are monotonic."""

    def __init__(self, core: Scheduler, quarantine_s: float) -> None:
        self._core = core
        self._quarantine = Quarantine(quarantine_s)
        self._ends = Rate()

    def add(
        self, generate: Generate, prompt: np.ndarray, emitted: np.ndarray, route: int, now_s: float
    ) -> None:
        """Adds the sequences as ``Scheduler.add`` does. Raises the RequestError that refuses
        them."""
        if not self._core.sequences:
            self._ends.start(now_s)
        try:
            self._check(generate, prompt, emitted)
            self._quarantine.check(prompt, generate.params, generate.cache_salt, now_s)
            self._core.add(generate, prompt, emitted, route, now_s)
        except RequestError as error:
            if error.code == QUARANTINED:
                QUARANTINE_REFUSALS.inc()
            if isinstance(error, Overloaded):
                error.retry_after_s = self._ends.retry_after_s(now_s)
            raise

    def note_ends(self, num: int, now_s: float) -> None:
        """``num`` sequences have ended: the rate of ends says when a refused one may come again."""
        self._ends.note(num, now_s)

    def quarantine(self, sequence: Sequence, now_s: float) -> None:
        """Refuses the request of ``sequence``, which workers died under, for some time."""
        QUARANTINED_REQUESTS.inc()
        name = client_text(sequence.request)
        log.warning("workers died under request %s: it is quarantined", name)
        self._quarantine.add(sequence.prompt, sequence.params, sequence.cache_salt, now_s)

    def _check(self, generate: Generate, prompt: np.ndarray, emitted: np.ndarray) -> None:
        """Passes everything without workers: the core refuses it then."""
        capacities = self._core.capacities
        if capacities:
            vocab_size = max(each.vocab_size for each in capacities)
            max_model_len = max(each.max_model_len for each in capacities)
            pooled_size = max(each.pooled_size for each in capacities)
            check_generate(generate, prompt, emitted, vocab_size, max_model_len, pooled_size)

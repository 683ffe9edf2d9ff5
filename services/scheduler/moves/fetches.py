"""Waiting sequences whose prefix another worker has. Pure.

A worker that is about to admit a sequence fetches its prefix first, if no worker that has it can
take the sequence sooner, and if that is quicker than computing (``copy_times``). Meanwhile the
sequence waits in the queue without a slot, and others are admitted before it. What has come is in
the prefix cache, where its admission finds it, whatever becomes of the rest.
"""

from collections.abc import Callable, Sized
from itertools import islice
from math import ceil
from weakref import WeakKeyDictionary

from prometheus_client import Counter

from services.scheduler.moves.fetch import Fetch
from services.scheduler.moves.inbox import FORGET_S
from services.scheduler.moves.roles import now_of
from services.scheduler.moves.transfers import Transfers
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import LOOK_S

MAX_FETCHES = 4  # to one worker, and from one. Chosen
MAX_CHOICES = 16  # of a plan: each looks into the caches of all workers. Chosen
MAX_TRIES = 3  # of a sequence
MIN_TOKENS = 128
"""Fewer are computed at once: a fetch waits for a plan of either worker. Chosen."""
AVOID_LOOKS = int(FORGET_S / LOOK_S)  # of a worker from which nothing came in time, by fetches

HITS = Counter("shoal_peer_hits", "Prefixes fetched from other workers", ["outcome"])
HIT_TOKENS = Counter("shoal_peer_hit_tokens", "Tokens of prefixes fetched from other workers")
DECLINED_TOKENS = Counter(
    "shoal_peer_hit_declined_tokens",
    "Tokens of prefixes of other workers that were computed, since fetching would take longer",
)


class Fetches:
    """The fetches between ``workers``. ``on_begin`` is called if the source has no plan, so that it
    gets one. ``clock`` shows the time in seconds."""

    def __init__(
        self,
        core: Scheduler,
        workers: list[Transfers],
        on_begin: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.on_begin = on_begin
        self._core, self._workers, self._clock = core, workers, clock
        self._fetches: dict[Sequence, Fetch] = {}
        self._tries: WeakKeyDictionary[Sequence, int] = WeakKeyDictionary()
        self._avoided: dict[tuple[Transfers, Transfers], int] = {}  # source and target

    def is_kept(self, worker: Transfers, sequence: Sequence) -> bool:
        """True if the prefix of ``sequence`` is on its way to ``worker``, or to another one that
        has room for it."""
        if not self._fetches:
            return False
        fetch = self._fetches.get(sequence)
        if fetch is not None and fetch.target is not worker:
            target = fetch.target.worker
            if not (target.admits and target.has_room_for(sequence)):
                return False
            return worker.worker.blocks.find_hit(sequence).num_blocks < fetch.end
        return fetch is not None or (self._may_try(sequence) and self._is_coming(worker, sequence))

    def note_admission(self, sequence: Sequence) -> None:
        if (fetch := self._fetches.get(sequence)) is not None:
            self._close(fetch, "ended")

    def plan(self, target: Transfers) -> None:
        """Called before ``target`` admits sequences, after the rows that take blocks."""
        for fetch in self._to(target):
            self._advance(fetch)
        self._begin(target)

    def look(self) -> bool:
        """Called every ``LOOK_S``. Returns True if workers without plans may get some."""
        num_before = len(self._fetches)
        self._avoided = {pair: num - 1 for pair, num in self._avoided.items() if num > 1}
        for fetch in [*self._fetches.values()]:
            fetch.look()
            self._advance(fetch)
            if fetch.sequence in self._fetches and fetch.is_late:
                self._avoided[fetch.source, fetch.target] = AVOID_LOOKS
                self._close(fetch, "given_up")
        return len(self._fetches) < num_before

    def remove(self, transfers: Transfers) -> None:
        """The worker is lost."""
        for fetch in [*self._fetches.values()]:
            if transfers in (fetch.source, fetch.target):
                self._close(fetch, "lost")
        self._avoided = {pair: num for pair, num in self._avoided.items() if transfers not in pair}
        for each in self._workers:
            each.fetch_times.pop(transfers, None)

    def reset(self) -> None:
        """No block that was computed before may be found by new sequences."""
        for fetch in [*self._fetches.values()]:
            self._close(fetch, "given_up")

    # --- one fetch ------------------------------------------------------------------------------

    def _advance(self, fetch: Fetch) -> None:
        is_known = self._core.sequences.get(fetch.sequence.key) is fetch.sequence
        if fetch.is_over or not is_known:
            self._close(fetch, "ended")
            return
        fetch.follow()
        if fetch.num_there >= fetch.num_wanted and fetch.target.has_all(fetch):
            self._close(fetch, "done")
        elif fetch.is_stuck:
            self._close(fetch, "given_up")

    def _close(self, fetch: Fetch, outcome: str) -> None:
        source, target = fetch.source, fetch.target
        del self._fetches[fetch.sequence], target.fetches[fetch], source.served[fetch]
        source.pins.drop(fetch)
        fetch.mark_left()
        size = source.shape.block_size
        HITS.labels(outcome).inc()
        HIT_TOKENS.inc((fetch.num_usable - fetch.first) * size)
        if outcome == "done":
            target.times_from(source).note(fetch.num_bytes, self._clock() - fetch.began_s)

    # --- new fetches ----------------------------------------------------------------------------

    def _begin(self, target: Transfers) -> None:
        """Of sequences that ``target`` is to admit."""
        worker, waiting = target.worker, self._core.queues.waiting
        if not waiting or len(self._workers) < 2 or target not in self._workers:
            return
        running = worker.running.values()
        first = [*islice(waiting.each_in_turn(_is_any, worker.next_look, running), MAX_CHOICES)]
        target.pins.yield_to(first[0])
        if not (worker.admits and worker.num_free_slots):
            return
        for sequence in first:
            if _is_full(target.fetches):
                return
            if self._may_fetch(target, sequence):
                self._choose(target, sequence)

    def _may_fetch(self, target: Transfers, sequence: Sequence) -> bool:
        is_movable = not sequence.is_isolated and sequence.num_worker_deaths <= 1
        return (
            is_movable
            and sequence not in self._fetches
            and self._may_try(sequence)
            and not self._is_coming(target, sequence)
        )

    def _may_try(self, sequence: Sequence) -> bool:
        return self._tries.get(sequence, 0) < MAX_TRIES

    def _choose(self, target: Transfers, sequence: Sequence) -> None:
        """Begins a fetch if that is quicker than computing."""
        worker, size = target.worker, target.shape.block_size
        first = worker.blocks.find_hit(sequence).num_blocks
        begin = first + sum(each.num_loadable(sequence, first) for each in worker.resources)
        if sequence.max_cached // size < begin + _least(target):
            return
        source, end = self._best_source(target, sequence, begin)
        if source is None or not self._is_next(target, sequence):
            return
        computing_s = target.choice.computing_s(begin, end)
        fetch = Fetch(sequence, source, target, first, self._clock(), computing_s)
        byte_s = target.times_from(source).byte_s
        chosen = end
        if byte_s and not target.choice.takes_all(sequence, begin, end):
            chosen = target.choice.quickest(
                (end, begin), end, lambda each: byte_s * fetch.num_bytes * (each > begin)
            )
        DECLINED_TOKENS.inc(target.choice.note(begin, chosen, end))
        self._tries[sequence] = self._tries.get(sequence, 0) + 1 if chosen == end else MAX_TRIES
        if chosen == end:
            self._start(fetch)

    def _best_source(
        self, target: Transfers, sequence: Sequence, begin: int
    ) -> tuple[Transfers | None, int]:
        """The worker with the longest prefix, and the number of its blocks, if that is worth it."""
        best, most = None, begin + _least(target) - 1
        for each in self._workers:
            if _is_full(each.served) or not each.may_reach(target):
                continue
            if (each, target) in self._avoided or each.worker.blocks.is_missing(sequence, most):
                continue
            num_blocks = each.worker.blocks.find_hit(sequence).num_blocks
            if num_blocks > most:
                best, most = each, num_blocks
        return best, most

    def _is_next(self, target: Transfers, sequence: Sequence) -> bool:
        """True if ``target`` would admit ``sequence`` now."""
        core, worker = self._core, target.worker
        if not core.placement.has_room(worker, sequence):
            return False
        num_waiting = len(core.queues.waiting)
        return core.placement.is_best(worker, sequence, num_waiting, now_of(core))

    def _start(self, fetch: Fetch) -> None:
        source, target = fetch.source, fetch.target
        self._fetches[fetch.sequence] = fetch
        source.served[fetch] = target.fetches[fetch] = None
        source.pins.add(fetch, fetch.blocks)
        source.introduce(target)
        if not source.worker.in_flight:
            self.on_begin()

    def _is_coming(self, target: Transfers, sequence: Sequence) -> bool:
        """True if a fetch for another sequence has enough of the prefix that ``sequence`` lacks."""
        return any(each.brings(sequence, _least(target)) for each in self._to(target))

    def _to(self, target: Transfers) -> list[Fetch]:
        return [each for each in self._fetches.values() if each.target is target]


def _is_full(deliveries: Sized) -> bool:
    return len(deliveries) >= MAX_FETCHES


def _least(target: Transfers) -> int:
    """The blocks of ``MIN_TOKENS``."""
    return ceil(MIN_TOKENS / target.shape.block_size)


def _is_any(sequence: Sequence) -> bool:
    return True

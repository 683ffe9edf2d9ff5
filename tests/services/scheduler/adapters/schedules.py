"""Random schedules of sequences with adapters."""

from random import Random
from typing import ClassVar

from msgspec.structs import replace

from services.scheduler.adapters.room import AdapterRoom
from services.scheduler.resource import Resource
from shared.wire.envelope import RequestOptions, read_options
from tests.services.scheduler.schedules import WEIGHTS, Mesh

DIGESTS = ["1" * 32, "2" * 32, "3" * 32, "4" * 32]


class AdapterMesh(Mesh):
    """Workers lack some adapters, load them later and forget unused ones. ``num_shared`` counts
    looks at workers with several sequences of one adapter, ``num_full`` at ones with the most
    adapters, and ``num_kept`` at ones with room that is kept for a starved sequence."""

    weights: ClassVar[dict[str, float]] = {**WEIGHTS, "load": 2, "forget": 1}

    def __init__(self, random: Random) -> None:
        self.max_adapters = random.randint(1, 3)
        self.share = random.choice([0.5, 1.0])
        self.reported: dict[str, set[str]] = {}
        self.rooms: dict[str, AdapterRoom] = {}
        self.num_shared = self.num_full = self.num_kept = self.num_forgotten = 0
        super().__init__(random)

    def resources_of(self, worker_id: str) -> list[Resource]:
        num = self.random.choice([0, len(DIGESTS) - 1, len(DIGESTS)])
        self.reported[worker_id] = {*self.random.sample(DIGESTS, num)}
        waits = self.core.queues.waiting.__contains__
        self.rooms[worker_id] = AdapterRoom(self.reported[worker_id], self.max_adapters, waits)
        return [self.rooms[worker_id]]

    def with_variant(self, options: RequestOptions) -> RequestOptions:
        has_one = self.random.random() < self.share
        return replace(options, adapter=self.random.choice(DIGESTS) if has_one else "")

    def fits_on(self, worker_id: str, num_tokens: int, options: RequestOptions) -> bool:
        has_it = not options.adapter or options.adapter in self.reported[worker_id]
        return has_it and super().fits_on(worker_id, num_tokens, options)

    def load(self) -> None:
        if self.workers:
            worker_id = self.random.choice(sorted(self.workers))
            self.reported[worker_id].add(self.random.choice(DIGESTS))
            self.core.note_fits(len(self.events))

    def forget(self) -> None:
        """Schedulers have workers forget unused adapters alone."""
        used = {each.options.adapter for each in self.core.sequences.values()}
        unused = [each for each in DIGESTS if each not in used]
        if self.workers and unused:
            worker_id, digest = self.random.choice(sorted(self.workers)), self.random.choice(unused)
            self.num_forgotten += digest in self.reported[worker_id]
            self.reported[worker_id].discard(digest)
            self.core.note_fits(len(self.events))

    def check(self) -> None:
        super().check()
        for worker_id, worker in self.workers.items():
            slots = [read_options(each.admit.options).adapter for each in worker.slots.values()]
            held = {each for each in slots if each}
            assert len(held) <= self.max_adapters
            running = self.core.workers[worker_id].running.values()
            adapters = {each.options.adapter for each in running} - {""}
            assert adapters <= self.reported[worker_id]
            self.num_shared += len(held) < len([each for each in slots if each])
            self.num_full += len(held) == self.max_adapters
            self.num_kept += self.rooms[worker_id].starved is not None

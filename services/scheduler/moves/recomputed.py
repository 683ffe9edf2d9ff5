"""Counts the tokens of prompts that are computed again."""

from weakref import WeakKeyDictionary

from prometheus_client import Counter

from services.scheduler.allocation import Allocation
from services.scheduler.queues import Queues
from services.scheduler.sequence import Sequence, WaitReason
from services.scheduler.worker_state import WorkerState

RECOMPUTED = Counter(
    "shoal_recomputed_tokens",
    "Tokens of prompts that a worker had computed and that are computed again",
    ["why"],
)


class Recomputed:
    """Knows the sequences of workers that have joined."""

    def __init__(self) -> None:
        self._allocations: WeakKeyDictionary[Sequence, Allocation] = WeakKeyDictionary()
        self._returned: WeakKeyDictionary[Sequence, tuple[int, WaitReason]] = WeakKeyDictionary()

    def begin(self, queues: Queues) -> None:
        before = queues.on_return

        def on_return(sequence: Sequence, why: WaitReason) -> None:
            before(sequence, why)
            self._note_return(sequence, why)

        queues.on_return = on_return

    def _note_return(self, sequence: Sequence, why: WaitReason) -> None:
        if (allocation := self._allocations.pop(sequence, None)) is not None:
            num_computed = min(allocation.num_computed, len(sequence.prompt))
            self._returned[sequence] = num_computed, why

    def join(self, worker: WorkerState) -> None:
        for sequence in worker.running.values():
            self._allocations[sequence] = sequence.allocated

    def note_admission(self, worker: WorkerState, sequence: Sequence) -> None:
        """``sequence`` has its slot, and as yet the cached blocks alone."""
        allocation = self._allocations[sequence] = sequence.allocated
        if (returned := self._returned.pop(sequence, None)) is not None:
            num_before, why = returned
            num_blocks = allocation.num_indexed
            num_blocks += sum(each.num_loadable(sequence, num_blocks) for each in worker.resources)
            num = num_before - num_blocks * worker.capacity.block_size
            RECOMPUTED.labels(why.label).inc(max(0, num))

"""Why a sequence waits. Pure."""

from enum import IntEnum


class Obstacle(IntEnum):
    """What keeps a waiting sequence from a slot, or why one had to leave its slot and waits again.

    The names of settings say which limit it is.
    """

    PLANS_IN_FLIGHT = 0  # the worker has its next steps already: pipeline-depth
    SLOTS = 1  # max-num-seqs
    KV_BLOCKS = 2
    STEP_BUDGET = 3  # max-num-batched-tokens
    PARTIAL_PREFILLS = 4  # max-num-partial-prefills
    LONG_PREFILLS = 5  # max-long-partial-prefills
    PREFIX = 6  # another choice fills blocks that it will share
    PROBATION = 7  # the worker has not shown yet that it works
    PLACEMENT = 8  # another worker is to take it
    ISOLATED = 9  # it is computed alone, or another one is: a worker died under it
    NO_WORKER = 10
    CREDIT = 11  # its client has not read what came
    PRIORITY = 12  # others came later and were sooner, or took its slot
    WORKER_LOST = 13
    HANDED_OVER = 14  # its worker leaves
    LATER_PRIORITY = 15  # those that it gives way to are computed: later-priority-share

    @property
    def label(self) -> str:
        return self.name.lower()

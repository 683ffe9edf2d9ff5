"""Selects sequences for the plans of a worker with a pipeline of stages.

The stages compute one plan each at the same time. A plan must not compute a sequence with a token
pending in another of these plans. A decoding sequence is therefore in one of ``num_stages``
consecutive plans, and each plan has its share of all decoding sequences. Prompts are not shared
out: their chunks may follow each other at once.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from services.scheduler.allocation import Allocation
from services.scheduler.sequence import Sequence
from shared.wire.messages import StepPlan


def is_in_other_stages(allocation: Allocation, in_flight: deque[StepPlan], num_stages: int) -> bool:
    """True if a token of the sequence is pending in one of the last plans ``in_flight``, which
    other stages would compute at the same time as the next plan."""
    if num_stages == 1:
        return False
    beside = list(islice(reversed(in_flight), num_stages - 1))
    return bool(beside) and allocation.last_step >= beside[-1].step


def with_share(
    runnable: Iterable[Sequence], running: Iterable[Sequence], num_stages: int
) -> list[Sequence]:
    """Returns the sequences of ``runnable`` for the next plan, in their order. The share of the
    decoding ones among all ``running`` is taken by earlier priority, then by the longest time since
    their last plan."""
    runnable = list(runnable)
    num_decoding = sum(_decodes(each) and each.has_credit for each in running)
    decoding = sorted(
        filter(_decodes, runnable),
        key=lambda each: (each.options.priority, each.allocated.last_step),
    )
    late = set(decoding[-(-num_decoding // num_stages) :])
    return [each for each in runnable if each not in late]


def _decodes(sequence: Sequence) -> bool:
    return sequence.allocated.may_have_drafts

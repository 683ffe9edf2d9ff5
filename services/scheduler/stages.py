"""Which sequences go into the plans of a worker whose model is a pipeline of stages.

Its stages compute as many plans at a time, if none of them has a sequence whose next token another
one brings. So a sequence that decodes is in one of as many plans that follow each other, and each
of these has its share of all that decode. Prompts are not shared out: their chunks may follow each
other at once.
"""

from collections import deque
from collections.abc import Iterable
from itertools import islice

from services.scheduler.sequence import Allocation, Sequence
from shared.wire.messages import StepPlan


def is_in_other_stages(allocation: Allocation, in_flight: deque[StepPlan], num_stages: int) -> bool:
    """Whether one of the last plans ``in_flight``, which would be computed beside the next one, has
    a sequence of which a token is pending."""
    if num_stages == 1:
        return False
    beside = list(islice(reversed(in_flight), num_stages - 1))
    return bool(beside) and allocation.last_step >= beside[-1].step


def with_share(
    runnable: Iterable[Sequence], running: Iterable[Sequence], num_stages: int
) -> list[Sequence]:
    """Returns those of ``runnable`` that the next plan has, in their order: of those that decode
    the ones of an earlier priority, and of these the ones that were computed longest ago, as many
    as are its share of all that are ``running``."""
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

"""Refuses requests whose first token would come later than promised. Pure.

The predicted time is that of the prompts ahead and its own, at the worker that is first done with
them, next to its streams. A short prompt overtakes long ones, which keep a part of each step
(``prefills.py``). If no slot is free, the time is at least that until enough sequences have ended.
Sequences that the new one overtakes, or that yield to it, do not count. A prompt that would be late
on an idle worker is accepted: waiting would not help.
"""

from collections.abc import Collection
from itertools import chain
from math import inf
from typing import cast

from services.scheduler.promises.stream_share import PromisedShare
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.errors import Overloaded

PROMISE_OUT_OF_REACH = "promise_out_of_reach"


def check_first_token(core: Scheduler, sequence: Sequence, ends_per_s: float) -> None:
    """Raises Overloaded with the time after which the promise of the new ``sequence`` could be
    kept. Only first attempts are refused. ``ends_per_s``: the rate at which sequences end; 0 if
    unknown."""
    promise = sequence.options.promise
    if promise is None or promise.ttft_ms is None or sequence.attempt > 1:
        return
    admitting = [each for each in core.workers.values() if each.admits]
    if not admitting:
        return
    promised_s = promise.ttft_ms / 1000
    alone_s, predicted_s = _predict_s(core, admitting, sequence, ends_per_s)
    if alone_s <= promised_s < predicted_s:
        raise Overloaded(
            f"the first token would come after some {1000 * predicted_s:.0f} ms;"
            f" promised are {promise.ttft_ms:.10g} (slo.ttft_ms, ttft-ms)",
            code=PROMISE_OUT_OF_REACH,
            retry_after_s=predicted_s - promised_s,
        )


def _predict_s(
    core: Scheduler, workers: Collection[WorkerState], sequence: Sequence, ends_per_s: float
) -> tuple[float, float]:
    """Returns the seconds to the first token on an idle worker, and now; 0 before any step was
    measured. Choices of one prompt count once."""
    limits = core.prefill_limits
    ahead = [each for each in core.queues.waiting if each.order < sequence.order]
    waiting_tokens = list({each.prompt_key: each.num_to_compute for each in ahead}.values())
    alone_s = prompt_s = inf
    num_free = 0
    for worker in workers:
        running = [each for each in worker.running.values() if not each.yields_to(sequence)]
        num_free += worker.num_free_slots + len(worker.running) - len(running)
        threshold = limits.threshold(worker)
        own = len(sequence.prompt) - worker.num_cached(sequence)
        is_short = own <= threshold
        most = threshold if is_short else inf
        running_tokens = [each.num_to_compute for each in running]
        num_ahead = sum(each for each in waiting_tokens if each <= most) / len(workers)
        num_ahead += sum(each for each in running_tokens if each <= most)
        num_long = sum(each > threshold for each in chain(running_tokens, waiting_tokens))
        num_kept = min(limits.max_long, num_long) if is_short else 0
        part = max(1, limits.max_partial - num_kept) / limits.max_partial
        share = cast(PromisedShare, worker.stream_share)
        own_s = share.alone_s(own, own)
        alone_s = min(alone_s, own_s)
        prompt_s = min(prompt_s, share.prompts_s((num_ahead + own) / part, own))
    num_ends = len(ahead) + 1 - num_free
    slot_s = num_ends / ends_per_s if num_ends > 0 and ends_per_s > 0 else 0.0
    return alone_s, max(prompt_s, slot_s)

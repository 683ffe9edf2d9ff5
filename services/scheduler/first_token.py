"""Refuses requests whose first token would come later than promised. Pure.

The predicted time is that of the prompts ahead and its own, at the worker that is first done with
them, next to its streams. A short prompt overtakes long ones, which keep a part of each step
(``prefills.py``). If no slot is free, the time is at least that until enough sequences have ended.
"""

from collections.abc import Collection
from itertools import chain
from math import inf

from services.scheduler.prefills import PrefillLimits
from services.scheduler.queues import WaitingQueue
from services.scheduler.sequence import Arrival
from services.scheduler.worker_state import WorkerState
from shared.errors import Overloaded

PROMISE_OUT_OF_REACH = "promise_out_of_reach"


def check_first_token(
    workers: Collection[WorkerState],
    waiting: WaitingQueue,
    limits: PrefillLimits,
    arrival: Arrival,
    ends_per_s: float,
) -> None:
    """Raises Overloaded with the time after which the promise could be kept.

    ``ends_per_s`` sequences end per second. Only first attempts are refused.
    """
    promise = arrival.options.promise
    if promise is None or promise.ttft_ms is None or arrival.generate.attempt > 1:
        return
    admitting = [each for each in workers if each.admits]
    if not admitting:
        return
    predicted_s = predict_s(admitting, waiting, limits, len(arrival.prompt), ends_per_s)
    late_s = predicted_s - promise.ttft_ms / 1000
    if late_s > 0:
        raise Overloaded(
            f"the first token would come after some {1000 * predicted_s:.0f} ms;"
            f" promised are {promise.ttft_ms:.10g} (slo.ttft_ms, ttft-ms)",
            code=PROMISE_OUT_OF_REACH,
            retry_after_s=late_s,
        )


def predict_s(
    workers: Collection[WorkerState],
    waiting: WaitingQueue,
    limits: PrefillLimits,
    prompt_len: int,
    ends_per_s: float,
) -> float:
    """Returns the seconds to the first token of a prompt; 0 before any step was measured."""
    all_waiting = [each.num_to_compute for each in waiting]
    prompt_s = inf
    for worker in workers:
        threshold = limits.threshold(worker)
        running = [each.num_to_compute for each in worker.running.values()]
        is_short = prompt_len <= threshold
        most = threshold if is_short else inf
        num_waiting = sum(each for each in all_waiting if each <= most) / len(workers)
        num_ahead = num_waiting + sum(each for each in running if each <= most)
        num_long = sum(each > threshold for each in chain(running, all_waiting))
        num_kept = min(limits.max_long, num_long) if is_short else 0
        part = max(1, limits.max_partial - num_kept) / limits.max_partial
        own_s = worker.stream_share.prompts_s(num_ahead + prompt_len, prompt_len) / part
        prompt_s = min(prompt_s, own_s)
    num_ends = len(waiting) + 1 - sum(each.num_free_slots for each in workers)
    slot_s = num_ends / ends_per_s if num_ends > 0 and ends_per_s > 0 else 0.0
    return max(prompt_s, slot_s)

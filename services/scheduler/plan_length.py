"""Chooses the number of steps of a plan: several if a step is shorter than the planning. Pure.

A decode-only plan may run several steps in the worker. All tokens of a plan arrive at once, and a
new prompt waits for the plans in flight, so the steps of a plan last at most ``PLAN_S`` together. A
plan has one step if another sequence waits for its end. Credit, lengths and free blocks of the
sequences bound the number of steps.
"""

from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState
from shared.wire.messages import MAX_STEPS

PLAN_S = 0.01


def lengthen(
    worker: WorkerState, builder: PlanBuilder, decoding: list[Sequence], most: int = MAX_STEPS
) -> None:
    """Gives an empty plan several steps, at most ``most``, and ``decoding``, the only sequences it
    computes, the blocks for them."""
    num_wanted = min(most, _num_wanted(worker, builder, decoding))
    num_steps = _num_with_blocks(worker, decoding, num_wanted)
    if num_steps == 1:
        return
    builder.ask_for(num_steps)
    for sequence in decoding:
        blocks = worker.try_extend(sequence, num_steps)
        assert blocks is not None
        builder.extend(sequence, blocks)


def _num_wanted(worker: WorkerState, builder: PlanBuilder, decoding: list[Sequence]) -> int:
    """Each step verifies the drafts of the step before, so both depths must be equal."""
    longest = min(worker.capacity.max_num_steps, worker.draft_depth.max_num_steps)
    is_steady = builder.verify_depth == builder.plan.draft_depth
    if longest == 1 or not decoding or not worker.is_proven or not is_steady:
        return 1
    if not all(each.allocated.may_have_drafts for each in decoding):
        return 1
    depth, vocab_size = builder.verify_depth, worker.capacity.vocab_size
    limits = [each.max_steps(depth, vocab_size) for each in decoding]
    limits += [worker.num_steps_left(each) for each in decoding]
    if longest * worker.step_s > PLAN_S:
        limits.append(int(PLAN_S / worker.step_s))
    return max(1, min(longest, *limits))


def _num_with_blocks(worker: WorkerState, decoding: list[Sequence], num_wanted: int) -> int:
    """Lowers ``num_wanted`` to the number of steps with enough free blocks."""
    for num_steps in range(num_wanted, 1, -1):
        num_lacking = sum(worker.num_blocks_lacking(each, num_steps) for each in decoding)
        if num_lacking <= worker.pool.num_free:
            return num_steps
    return 1

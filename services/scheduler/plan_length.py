"""Decides how many steps a plan asks for: several where a step costs less than to plan it. Pure.

A plan that only decodes may run several times without coming back. It asks for as many steps as
take ``PLAN_S`` together: all tokens of a plan come at once, and a prompt that arrives waits for the
plans in flight. Where somebody waits already, or joins those that it gives way to, there is one
step a plan. Nobody gets more steps than credit, length and the worker's blocks allow.
"""

from services.scheduler.plan_builder import PlanBuilder
from services.scheduler.sequence import Sequence
from services.scheduler.worker_state import WorkerState

PLAN_S = 0.01


def lengthen(worker: WorkerState, builder: PlanBuilder, decoding: list[Sequence]) -> None:
    """Has the plan that ``builder`` begins ask for several steps, if ``decoding`` are all that it
    computes, and gives these the blocks for them."""
    num_steps = _num_with_blocks(worker, decoding, _num_wanted(worker, builder, decoding))
    if num_steps == 1:
        return
    builder.ask_for(num_steps)
    for sequence in decoding:
        blocks = worker.try_extend(sequence, num_steps)
        assert blocks is not None
        builder.extend(sequence, blocks)


def _num_wanted(worker: WorkerState, builder: PlanBuilder, decoding: list[Sequence]) -> int:
    """Every step verifies what the one before it has drafted, so the depth must stay the same."""
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
    """Returns as many of ``num_wanted`` steps as there are blocks for."""
    for num_steps in range(num_wanted, 1, -1):
        num_lacking = sum(worker.num_blocks_lacking(each, num_steps) for each in decoding)
        if num_lacking <= worker.pool.num_free:
            return num_steps
    return 1

"""Decides how many drafts a worker makes of each sequence: a fixed number, or as many as pay.

**What pays.** The depth d at which a row's tokens per second are most: the tokens that it brings, 1
+ p₁ + p₁p₂ + … + p₁⋯p_d, over the time of a step. pᵢ, the chance that draft i is right if those
before it were, is counted over all rows of the worker, and what is older counts less; a draft that
was asked for and not there counts as wrong, since it brings nothing. A position that was not tried
lately is taken to be like the one before it. Step times are kept for each depth and each size of
batch, in powers of two, from steps that compute no prompts. A batch of a size that is new first
goes through the depths 0, 1, 2, 4 … and the deepest, twice, a few steps each. From then on the
depth is decided every 32 steps, and another one has to promise 3 % more. On 4 of 224 steps another
depth is tried, by turns those beside it and none. A plan that asks for several steps has them all
at one depth, so it is no longer than the shortest trial. A machine that is slower for a while must
not look like a depth that is: so steps at the depth that was decided measure the pace of the
machine, once their own cost is known, and the cost of a step at another depth is its time at this
pace. Of several times the lower quartile counts, since what disturbs a step makes it longer. A step
that computes prompts too counts for an eighth of a step: where there are hardly any others, times
are those of the nearest size, or guessed.
"""

from collections.abc import Callable

from services.scheduler.acceptance import Acceptance
from services.scheduler.step_times import StepTimes
from shared.wire.messages import MAX_STEPS, Capacity, RunKind, StepPlan, StepResult

SWEEP_RUN = 3  # steps
NUM_SWEEPS = 2
DECIDED_EVERY = 32
PROBED_EVERY = 7 * DECIDED_EVERY
PROBE_RUN = 4
HYSTERESIS = 1.03
MIXED = 1 / 8
GUESS = 1 / 8  # of a step: what a draft may cost where nothing is known


class BatchSize:
    """Decides the depth for batches of about one size: each ``turn`` of them is a step."""

    def __init__(self, size: int, deepest: int, depth: int) -> None:
        self.size = size
        self.times = StepTimes(min(depth, deepest))
        self._deepest = deepest
        spread = {0, deepest} | {1 << i for i in range(deepest.bit_length())}
        self._sweep = sorted(spread, reverse=True) * NUM_SWEEPS
        self._turn = 0.0

    def advance(self, turns: float) -> bool:
        """Counts ``turns``, and returns whether it is time to decide."""
        before = self._num_since_sweep
        self._turn += turns
        since = self._num_since_sweep
        return since >= 0 and since // DECIDED_EVERY > before // DECIDED_EVERY

    @property
    def depth(self) -> int:
        """The depth of the plan that is made next."""
        since = self._num_since_sweep
        if since < 0:
            return self._sweep[int(self._turn) // SWEEP_RUN]
        cycle, step = divmod(since, PROBED_EVERY)
        if step < PROBED_EVERY - PROBE_RUN:
            return self.times.depth
        return self._others[cycle % len(self._others)]

    def decide(self, payoff: Callable[[int], float]) -> None:
        best = max(range(self._deepest + 1), key=payoff)
        if payoff(best) > HYSTERESIS * payoff(self.times.depth):
            self.times.decide(best)

    @property
    def _num_since_sweep(self) -> int:
        return int(self._turn) - SWEEP_RUN * len(self._sweep)

    @property
    def _others(self) -> list[int]:
        """The depths to try now and then beside the one that was decided."""
        depth = self.times.depth
        others = {each for each in (depth + 1, depth - 1, 0) if 0 <= each <= self._deepest}
        return sorted(others - {depth}) or [depth]


class DraftDepth:
    """``now`` is the depth for the plan that is made next, of up to ``max_num_steps``."""

    def __init__(self, capacity: Capacity) -> None:
        self.now = capacity.num_speculative_tokens
        self.max_num_steps = min(SWEEP_RUN, PROBE_RUN) if capacity.adapts_depth else MAX_STEPS
        self._capacity = capacity
        self._acceptance = Acceptance(capacity.num_speculative_tokens)
        self._sizes: dict[int, BatchSize] = {}

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from ``result``, which ``plan`` has brought."""
        if not self._capacity.adapts_depth or not plan.decode:
            return
        depths = {row.slot: row.verify_depth for row in plan.decode}
        sampled = [row for row in result.rows if row.run.kind == RunKind.OUTPUT]
        rows = [(depths[row.slot], row.run.num_accepted) for row in sampled if row.slot in depths]
        size = self._size(len(plan.decode))
        time_s = (result.step_s + result.idle_s) / result.num_steps
        is_plain = not plan.prefill and len(set(depths.values())) == 1 and time_s > 0
        turns = result.num_steps if is_plain else MIXED
        self._acceptance.note(rows, turns)
        if is_plain:
            size.times.note(plan.decode[0].verify_depth, time_s)
        if size.advance(turns):
            self._decide(size)
        self.now = size.depth

    def _size(self, num_rows: int) -> BatchSize:
        key = (num_rows - 1).bit_length()
        if key not in self._sizes:
            room = room_for_drafts(self._capacity.max_num_batched_tokens, 1 << key)
            deepest = min(self._capacity.num_speculative_tokens, room)
            near = min(self._sizes.values(), key=lambda each: abs(each.size - key), default=None)
            depth = near.times.depth if near else deepest
            self._sizes[key] = BatchSize(key, deepest, depth)
        return self._sizes[key]

    def _decide(self, size: BatchSize) -> None:
        """Takes the step times of the nearest size for which they are known."""
        known = [each for each in self._sizes.values() if each.times.is_known]
        near = min(known, key=lambda each: abs(each.size - size.size), default=None)
        cost = near.times.cost if near else _guess
        size.decide(lambda depth: self._acceptance.num_tokens(depth) / cost(depth))


def room_for_drafts(budget: int, num_decoding: int) -> int:
    """Returns how many drafts each of ``num_decoding`` sequences may verify: half of what their own
    tokens leave of the budget is kept for prompts."""
    return max(0, (budget - num_decoding) // (2 * num_decoding))


def _guess(depth: int) -> float:
    return 1 + depth * GUESS

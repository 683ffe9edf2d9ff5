"""Draft depth of a worker, adapted for the most tokens per second.

**Objective.** The depth d with the most tokens per second of a row: 1 + p₁ + p₁p₂ + … + p₁⋯p_d, the
expected tokens of a step, over the time of a step. pᵢ is the probability that draft i is accepted
if all drafts before it are. It is counted over all rows of the worker, and old counts decay. A
draft that was planned but not made counts as rejected. A position without recent counts takes the
probability of the position before it.

**Trials.** Step times are kept for each depth and each size of batch (a power of two), from steps
without prompts. A new size of batch first runs a few steps at each of the depths 0, 1, 2, 4 … and
the deepest, twice. From then on the depth is decided every 32 steps, and a change must promise 3 %
more. In 4 of 224 steps another depth is tried: in turn one less, one more, and none. All steps of a
plan have one depth, so a plan is no longer than the shortest trial.

**Times.** A machine that is slow for a while must not make a depth look slow. Steps at the decided
depth measure the pace of the machine, once their own cost is known. The cost of another depth is
its step time over this pace. Interference only makes a step longer, so the lower quartile of
several times counts. A step with prompts counts as an eighth of a step. A size of batch without
times uses the times of the nearest size, or a guess.
"""

from collections import deque
from collections.abc import Callable
from itertools import pairwise

from services.scheduler.decode_times import typical
from services.scheduler.plan_builder import DraftDepth, room_for_drafts
from shared.wire.messages import Capacity, RunKind, StepPlan, StepResult

SWEEP_RUN = 3  # steps
NUM_SWEEPS = 2
DECIDED_EVERY = 32
PROBED_EVERY = 7 * DECIDED_EVERY
PROBE_RUN = 4
HYSTERESIS = 1.03
MIXED = 1 / 8
GUESS = 1 / 8  # of a step: the cost of a draft before any measurement


class BatchSize:
    """Decides the depth for batches of about one size. A step without prompts is one ``turn``."""

    def __init__(self, size: int, deepest: int, depth: int) -> None:
        self.size = size
        self.times = StepTimes(min(depth, deepest))
        self._deepest = deepest
        spread = {0, deepest} | {1 << i for i in range(deepest.bit_length())}
        self._sweep = sorted(spread, reverse=True) * NUM_SWEEPS
        self._turn = 0.0

    def advance(self, turns: float) -> bool:
        """Counts ``turns``. Returns True if a decision is due."""
        before = self._num_since_sweep
        self._turn += turns
        since = self._num_since_sweep
        return since >= 0 and since // DECIDED_EVERY > before // DECIDED_EVERY

    @property
    def depth(self) -> int:
        """The depth of the next plan."""
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
        """The depths to try now and then in place of the decided one."""
        depth = self.times.depth
        others = {each for each in (depth + 1, depth - 1, 0) if 0 <= each <= self._deepest}
        return sorted(others - {depth}) or [depth]


class AdaptiveDepth(DraftDepth):
    """Adapts the depth of a worker that allows it."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__(capacity)
        if capacity.adapts_depth:
            self.max_num_steps = min(SWEEP_RUN, PROBE_RUN)
        self._capacity = capacity
        self._acceptance = Acceptance(capacity.num_speculative_tokens)
        self._sizes: dict[int, BatchSize] = {}

    def note(self, plan: StepPlan, result: StepResult) -> None:
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
        """Uses the step times of the nearest size with known times."""
        known = [each for each in self._sizes.values() if each.times.is_known]
        near = min(known, key=lambda each: abs(each.size - size.size), default=None)
        cost = near.times.cost if near else _guess
        size.decide(lambda depth: self._acceptance.num_tokens(depth) / cost(depth))


def _guess(depth: int) -> float:
    return 1 + depth * GUESS


HORIZON = 256  # steps after which the weight of a count has fallen to 1/e
PRIOR = 0.5  # acceptance of the first draft before any was verified
PRIOR_WEIGHT = 0.1  # in tries; at later positions the rate of the position before weighs 1


class Acceptance:
    """Counts verified and accepted drafts of all rows by their position."""

    def __init__(self, max_depth: int) -> None:
        self._tried = [0.0] * max_depth
        self._right = [0.0] * max_depth

    def note(self, rows: list[tuple[int, int]], turns: float) -> None:
        """Counts a step. ``rows`` are pairs of verified and accepted drafts."""
        kept = 1 - turns / HORIZON
        self._tried = [kept * each for each in self._tried]
        self._right = [kept * each for each in self._right]
        for depth, num_accepted in rows:
            for i in range(min(depth, num_accepted + 1)):
                self._tried[i] += 1
                self._right[i] += i < num_accepted

    def num_tokens(self, depth: int) -> float:
        """Returns the expected tokens of a row that verifies ``depth`` drafts."""
        rate, weight, reached, num = PRIOR, PRIOR_WEIGHT, 1.0, 1.0
        for tried, right in zip(self._tried[:depth], self._right, strict=False):
            rate, weight = (right + weight * rate) / (tried + weight), 1.0
            reached *= rate
            num += reached
        return num


WINDOW = 16  # times kept


class StepTimes:
    """Step times in seconds at each depth, scaled to the machine's initial pace. ``depth`` is the
    decided depth."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._num_own = 0  # measured steps since the decision
        self._times: dict[int, deque[float]] = {}
        self._paces: deque[float] = deque(maxlen=WINDOW)

    @property
    def is_known(self) -> bool:
        return len(self._times) > 1

    def decide(self, depth: int) -> None:
        if depth != self.depth:
            self.depth, self._num_own = depth, 0

    def note(self, depth: int, time_s: float) -> None:
        if depth == self.depth and self._num_own >= WINDOW:
            self._paces.append(time_s / typical(self._times[depth]))
            return
        self._num_own += depth == self.depth
        times = self._times.setdefault(depth, deque(maxlen=WINDOW))
        times.append(time_s / (typical(self._paces) if self._paces else 1.0))

    def cost(self, depth: int) -> float:
        """Returns the seconds of a step at ``depth``: interpolated between the two nearest known
        depths, or extrapolated, but not below the fastest known depth."""
        points = sorted((known, typical(times)) for known, times in self._times.items())
        lines = list(pairwise(points))
        (x0, y0), (x1, y1) = next((line for line in lines if depth <= line[1][0]), lines[-1])
        return max(y0 + (y1 - y0) * (depth - x0) / (x1 - x0), min(y for _, y in points))

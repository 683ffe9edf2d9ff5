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

from collections import deque
from collections.abc import Callable, Iterable
from itertools import pairwise

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


HORIZON = 256  # steps after which what was accepted counts 1/e
PRIOR = 0.5  # chance of the first draft before any was verified
PRIOR_WEIGHT = 0.1  # in tries; for later drafts the chance of the one before weighs 1


class Acceptance:
    """Counts drafts of all rows that were verified and accepted, by their position."""

    def __init__(self, max_depth: int) -> None:
        self._tried = [0.0] * max_depth
        self._right = [0.0] * max_depth

    def note(self, rows: list[tuple[int, int]], turns: float) -> None:
        """Counts a step whose ``rows`` are (drafts to verify, drafts accepted)."""
        kept = 1 - turns / HORIZON
        self._tried = [kept * each for each in self._tried]
        self._right = [kept * each for each in self._right]
        for depth, num_accepted in rows:
            for i in range(min(depth, num_accepted + 1)):
                self._tried[i] += 1
                self._right[i] += i < num_accepted

    def num_tokens(self, depth: int) -> float:
        """Returns the mean number of tokens that a row brings if it verifies ``depth`` drafts."""
        rate, weight, reached, num = PRIOR, PRIOR_WEIGHT, 1.0, 1.0
        for tried, right in zip(self._tried[:depth], self._right, strict=False):
            rate, weight = (right + weight * rate) / (tried + weight), 1.0
            reached *= rate
            num += reached
        return num


WINDOW = 16  # times that are kept


class StepTimes:
    """Keeps the seconds of steps at each depth, scaled to the pace that the machine had at first.

    ``depth`` is the one that was decided.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._num_own = 0  # steps since it was decided
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
        """Returns the seconds of a step at ``depth``: on a line through the two known depths that
        are nearest, but not less than the fastest of all known ones."""
        points = sorted((known, typical(times)) for known, times in self._times.items())
        lines = list(pairwise(points))
        (x0, y0), (x1, y1) = next((line for line in lines if depth <= line[1][0]), lines[-1])
        return max(y0 + (y1 - y0) * (depth - x0) / (x1 - x0), min(y for _, y in points))


def typical(times: Iterable[float]) -> float:
    """Returns the lower quartile: what disturbs a step makes it longer."""
    ordered = sorted(times)
    return ordered[len(ordered) // 4]

"""Time share for sequences of a later priority next to earlier ones. Pure.

Later sequences join a plan only as often as their share of the time allows, or always if no first
sequence is left.

**Account.** Each step in which later sequences have work adds its time, times the share, to their
balance; the share is smaller if the promises of first ones leave less. A step they join subtracts
its cost: its time beyond the typical time of the last ``NUM_TIMES`` plans without them and with
about equally many decoding sequences. If the step has prompts of first sequences, which differ in
time, the cost is the later ones' part of its tokens. Rows without cost, as more rows on a GPU can
be, therefore join nearly every step. To prevent starvation, later sequences always join after
``LONGEST_PERIOD`` − 1 steps without them.

**Plans.** A plan that later sequences join has one step. Plans without them may have several steps,
each cheaper than a plan of its own. The typical time is that of a step in these plans, so the
overhead of a one-step plan is part of the cost of joining.

**Pieces.** A long chunk must not interrupt an interactive stream. Later sequences have a number of
tokens per step that uses up their share if they join one step in ``PERIOD``. The number doubles if
they cost less than half of that, and halves if they cost more. For ``LINGER_S`` after a first
sequence was computed, prompts of later sequences alone are cut into the same pieces: a client that
soon asks again finds a step of theirs in flight.
"""

from dataclasses import dataclass
from math import inf

from services.scheduler.decode_times import NUM_TIMES, DecodeTimes
from services.scheduler.priority_share import PriorityShare
from shared.wire.messages import StepPlan, StepResult

PERIOD = 8
LONGEST_PERIOD = 64
MIN_TOKENS = 16
LINGER_S = 1.0
MAX_SAVED = 4  # steps of income, or of expected cost, that the balance may hold
SMOOTHING = 1 / 4  # weight of a new cost in the expected one


@dataclass(frozen=True, slots=True)
class _Turn:
    """The number of rows of first sequences in a plan; rows of later ones follow them. ``share``:
    of its time, for later ones."""

    num_prefill: int
    num_decode: int
    is_joined: bool
    share: float


class LaterShare(PriorityShare):
    """The account of one worker. Later sequences get ``share`` of its time."""

    def __init__(self, share: float, max_num_batched_tokens: int) -> None:
        self.max_tokens = min(MIN_TOKENS, max_num_batched_tokens)
        self._share = share
        self._limit = max_num_batched_tokens
        self._balance_s = self._expected_cost_s = 0.0
        self._alone_s = inf  # seconds of steps since a plan with both kinds to choose from
        self._num_without = self._num_joined = 0  # steps in a row
        self._turns: dict[int, _Turn] = {}  # plans in flight, by step
        self._times = DecodeTimes()

    @property
    def expects_first(self) -> bool:
        return self._alone_s < LINGER_S

    def join(self, plan: StepPlan, spare: float) -> bool:
        is_joined = plan.num_steps == 1 and self.may_join(len(plan.decode), bool(plan.prefill))
        self._num_without = 0 if is_joined else self._num_without + plan.num_steps
        self._num_joined = self._num_joined + 1 if is_joined else 0
        share = min(self._share, spare)
        self._turns[plan.step] = _Turn(len(plan.prefill), len(plan.decode), is_joined, share)
        return is_joined

    def has_joined(self, plan: StepPlan) -> bool:
        turn = self._turns.get(plan.step)
        return turn is not None and _num_later(plan, turn) > 0

    def note(self, plan: StepPlan, result: StepResult) -> None:
        turn = self._turns.pop(plan.step, None)
        num_later = _num_later(plan, turn) if turn is not None else 0
        if not num_later and plan.decode and not plan.prefill:
            self._times.note_decode(len(plan.decode), result.step_s / result.num_steps)
        if turn is None:
            # No later sequence was held back, so no time is saved up.
            self._balance_s = min(self._balance_s, 0.0)
            self._alone_s += result.step_s
            return
        self._alone_s = 0.0
        income_s = turn.share * result.step_s
        cost_s = self._cost_s(turn, plan, num_later, result.step_s) if num_later else 0.0
        most_s = MAX_SAVED * max(income_s / result.num_steps, self._expected_cost_s)
        self._balance_s = min(self._balance_s + income_s - cost_s, max(income_s, most_s))

    def may_join(self, num_decode: int, has_prefill: bool = False) -> bool:
        if self._num_without + 1 >= LONGEST_PERIOD:
            return True
        if self._num_joined >= NUM_TIMES:
            return False  # times of steps without them are needed again
        if not has_prefill and not self._times.typical_s(num_decode):
            return False
        num_in_flight = sum(turn.is_joined for turn in self._turns.values())
        return self._balance_s > num_in_flight * self._expected_cost_s

    def _cost_s(self, turn: _Turn, plan: StepPlan, num_later: int, step_s: float) -> float:
        own_s = self._times.typical_s(turn.num_decode)
        if turn.num_prefill or not own_s:
            cost_s = step_s * num_later / _num_tokens(plan, 0, 0)
        else:
            cost_s = max(0.0, step_s - own_s)
            self._adapt(num_later, cost_s, PERIOD * own_s * self._share / (1 - self._share))
        self._expected_cost_s += SMOOTHING * (cost_s - self._expected_cost_s)
        return cost_s

    def _adapt(self, num_tokens: int, cost_s: float, max_cost_s: float) -> None:
        """Adapts ``max_tokens`` to the cost of ``num_tokens`` tokens."""
        if cost_s > max_cost_s:
            num_tokens = min(num_tokens, self.max_tokens) // 2
            self.max_tokens = min(max(num_tokens, MIN_TOKENS), self._limit)
        elif 2 * cost_s < max_cost_s and 2 * num_tokens > self.max_tokens:
            self.max_tokens = min(2 * self.max_tokens, self._limit)


def _num_later(plan: StepPlan, turn: _Turn) -> int:
    return _num_tokens(plan, turn.num_prefill, turn.num_decode)


def _num_tokens(plan: StepPlan, num_prefill: int, num_decode: int) -> int:
    """Counts the tokens of the rows after the first ``num_prefill`` and ``num_decode``."""
    num_tokens = sum(row.num_tokens for row in plan.prefill[num_prefill:])
    return num_tokens + sum(1 + row.verify_depth for row in plan.decode[num_decode:])

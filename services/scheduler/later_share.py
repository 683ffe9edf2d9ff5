"""Bounds what sequences of a later priority take of a worker's time beside earlier ones. Pure.

A plan first computes those that give way to nobody. The others, its *later* ones, join it only as
often as their share of the time allows; where there is nobody whom they give way to, always.

**The account.** Each step beside which later ones have work adds its time, times the share, to
what they may take; one that they join takes off what they have cost. That is the time by which it
was longer than the typical one of the last ``NUM_TIMES`` plans of about as many decoding sequences
without them. Where it computes prompts of first ones too, whose times differ, it is their part of
the tokens. What costs nothing, as more rows on a GPU may, so joins nearly every step. Whatever the
times say, they join the next plan where one more would make ``LONGEST_PERIOD`` steps without them:
so none starves.

**Plans.** One that they join has one step. Without them it may have several, which cost less each
than a plan of its own: so typical is what a step takes in the plans that the first ones have
without them, however long, and what a plan of one step costs more is a cost of those that join it.

**Pieces.** An interactive stream must not stand still for a long chunk either. So later ones have
so many tokens of a step that they use up their share if they join one in ``PERIOD``: twice as many
where these have cost less than half of that, half as many where they have cost more. And for
``LINGER_S`` after a first one was computed prompts of later ones alone come in such pieces, for who
asks again soon finds one of their steps in flight.
"""

from collections import deque
from dataclasses import dataclass
from math import inf

from services.scheduler.draft_depth import typical
from services.scheduler.queues import WaitingQueue
from services.scheduler.sequence import Sequence
from shared.wire.messages import StepPlan, StepResult

PERIOD = 8
LONGEST_PERIOD = 64
MIN_TOKENS = 16
NUM_TIMES = 16
MIN_TIMES = 4  # that have to be known before anything is compared with them
LINGER_S = 1.0
MAX_SAVED = 4  # steps, as many as may be in flight, or what one plan of more brings at once
SMOOTHING = 1 / 4  # of a new cost in the expected one


class Front:
    """Divides those that run and may be computed, given oldest first: who gives way to nobody of
    them, nor to one that waits, is in ``first``, the others are in ``later``. ``has_later``: there
    are such, or one waits. ``is_past``: the first have what they get."""

    def __init__(self, running: list[Sequence], waiting: WaitingQueue) -> None:
        self.first: list[Sequence] = []
        self.later: list[Sequence] = []
        self.has_later = self.is_past = False
        leader = waiting.leader_of(running[-1]) if running else None
        self._heads = [leader] if leader is not None else []
        if leader is None and len({each.options.priority for each in running}) <= 1:
            self.first, self._heads = running, running[:1]  # known without a look at each
            return
        for sequence in running:
            if self.leads(sequence):
                self.later.append(sequence)
            else:
                self.first.append(sequence)
                self.admit(sequence)
        self.has_later = bool(self.later)

    def admit(self, sequence: Sequence) -> None:
        """It is computed, too."""
        if not self.is_past and not any(
            each.options.priority <= sequence.options.priority and each.order < sequence.order
            for each in self._heads
        ):
            self._heads.append(sequence)

    def leads(self, sequence: Sequence) -> bool:
        """Whether ``sequence`` gives way to one of them."""
        return any(map(sequence.gives_way_to, self._heads))


@dataclass(frozen=True, slots=True)
class _Turn:
    """The rows of a plan that are of first sequences: they stand in front of the later ones'."""

    num_prefill: int
    num_decode: int
    is_joined: bool


class LaterShare:
    """The account of one worker: ``share`` of its time is for later sequences. Those that join a
    plan have ``max_tokens`` of it."""

    def __init__(self, share: float, max_num_batched_tokens: int) -> None:
        self.max_tokens = min(MIN_TOKENS, max_num_batched_tokens)
        self._share = share
        self._limit = max_num_batched_tokens
        self._balance_s = self._expected_cost_s = 0.0
        self._alone_s = inf  # seconds of steps since later ones were held back or joined
        self._num_without = self._num_joined = 0  # steps in a row
        self._turns: dict[int, _Turn] = {}  # of the plans in flight, by their step
        self._times: dict[int, deque[float]] = {}

    @property
    def expects_first(self) -> bool:
        """Whether one was computed so lately that another may come."""
        return self._alone_s < LINGER_S

    def join(self, plan: StepPlan) -> bool:
        """Returns whether later sequences join ``plan``, which has the rows of the first ones. One
        of several steps was made so because they do not."""
        is_joined = plan.num_steps == 1 and self.may_join(len(plan.decode), bool(plan.prefill))
        self._num_without = 0 if is_joined else self._num_without + plan.num_steps
        self._num_joined = self._num_joined + 1 if is_joined else 0
        self._turns[plan.step] = _Turn(len(plan.prefill), len(plan.decode), is_joined)
        return is_joined

    def has_joined(self, plan: StepPlan) -> bool:
        """Whether later sequences are in ``plan``, whose result is not noted yet."""
        turn = self._turns.get(plan.step)
        return turn is not None and _num_later(plan, turn) > 0

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Learns from ``result``, which ``plan`` has brought."""
        turn = self._turns.pop(plan.step, None)
        num_later = _num_later(plan, turn) if turn is not None else 0
        if not num_later and plan.decode and not plan.prefill:
            self._times_of(len(plan.decode)).append(result.step_s / result.num_steps)
        if turn is None:
            # Nobody was held back: nothing is saved for when somebody is.
            self._balance_s = min(self._balance_s, 0.0)
            self._alone_s += result.step_s
            return
        self._alone_s = 0.0
        income_s = self._share * result.step_s
        cost_s = self._cost_s(turn, plan, num_later, result.step_s) if num_later else 0.0
        most_s = MAX_SAVED * max(income_s / result.num_steps, self._expected_cost_s)
        self._balance_s = min(self._balance_s + income_s - cost_s, max(income_s, most_s))

    def may_join(self, num_decode: int, has_prefill: bool = False) -> bool:
        """Returns whether later sequences may join a plan with ``num_decode`` first ones that
        decode, and prompts of others where it ``has_prefill``."""
        if self._num_without + 1 >= LONGEST_PERIOD:
            return True
        if self._num_joined >= NUM_TIMES:
            return False  # the times of steps without them must not be old
        if not has_prefill and len(self._times_of(num_decode)) < MIN_TIMES:
            return False
        num_in_flight = sum(turn.is_joined for turn in self._turns.values())
        return self._balance_s > num_in_flight * self._expected_cost_s

    def _cost_s(self, turn: _Turn, plan: StepPlan, num_later: int, step_s: float) -> float:
        times = self._times_of(turn.num_decode)
        if turn.num_prefill or not times:
            cost_s = step_s * num_later / _num_tokens(plan, 0, 0)
        else:
            own_s = typical(times)
            cost_s = max(0.0, step_s - own_s)
            self._adapt(num_later, cost_s, PERIOD * own_s * self._share / (1 - self._share))
        self._expected_cost_s += SMOOTHING * (cost_s - self._expected_cost_s)
        return cost_s

    def _adapt(self, num_tokens: int, cost_s: float, max_cost_s: float) -> None:
        """So many tokens have cost ``cost_s``."""
        if cost_s > max_cost_s:
            num_tokens = min(num_tokens, self.max_tokens) // 2
            self.max_tokens = min(max(num_tokens, MIN_TOKENS), self._limit)
        elif 2 * cost_s < max_cost_s and 2 * num_tokens > self.max_tokens:
            self.max_tokens = min(2 * self.max_tokens, self._limit)

    def _times_of(self, num_decode: int) -> deque[float]:
        """Of a step, in the last plans of about so many sequences, which all decode."""
        size = max(0, num_decode - 1).bit_length()
        return self._times.setdefault(size, deque(maxlen=NUM_TIMES))


def _num_later(plan: StepPlan, turn: _Turn) -> int:
    return _num_tokens(plan, turn.num_prefill, turn.num_decode)


def _num_tokens(plan: StepPlan, num_prefill: int, num_decode: int) -> int:
    """Counts the tokens of all rows but the first."""
    num_tokens = sum(row.num_tokens for row in plan.prefill[num_prefill:])
    return num_tokens + sum(1 + row.verify_depth for row in plan.decode[num_decode:])

"""Time share for decoding sequences (streams) next to prompts. Pure.

Each stream has a promised time per token: its own, or a multiple of the time that a step takes
without prompts. Prompts join a worker's steps as far as the promises allow.

**Account.** A plan with streams adds the tightest promise, times its number of steps, to the
balance, and subtracts its time: the predicted one until its result has arrived. The next step may
take the promise and the balance together, but no longer than the promise or a burst. Streams save
up to ``SAVED_S``, so a few prompts meet a rested worker. A stream with a promise of its own saves
no more than a burst, of the time in which tokens of plans with several steps arrive anyway.

**Keys.** While several API keys send requests, bursts are as short, also of prompts alone: a new
request waits for the steps in flight.

**Joining.** Short steps cost more per token of a prompt. Prompts therefore join if the step has
room for all their tokens or may take ``ENOUGH`` of the longest time; else the streams first decode
alone until it may take all of that. Prompts get at least ``MIN_SHARE`` of the time, even if the
streams alone are slower than promised. The next prompt to be admitted joins at once, before the
others, if the promise of a single step leaves time for it: a short question waits neither for long
prompts nor for the balance.
"""

from dataclasses import dataclass
from math import ceil, inf

from services.scheduler.plan_builder import Room, StreamShare
from services.scheduler.promises.step_model import StepModel
from services.scheduler.sequence import Sequence
from shared.wire.envelope import Promise
from shared.wire.messages import Capacity, RunKind, StepPlan, StepResult

BURST_S, SAVED_S = 0.04, 0.2
SHORT_BURST_S = 0.01  # as a plan of several steps
LINGER_S = 1.0  # of steps, after which a key without new sequences does not count
ENOUGH = 3 / 4
MIN_SHARE = 1 / 8
MIN_TOKENS = 16  # of prompts in a step they join
MAX_DEBT = 4  # bursts
MEASURED_EVERY, FIRST_EVERY = 64, 4  # steps with prompts in a row, then one without
SMOOTHING = 1 / 16


@dataclass(frozen=True, slots=True)
class _Shape:
    """A plan in flight: its rows, and its predicted time; ``limit_s`` is the promise per step, inf
    without one. ``is_kept``: its prompts do not end the wait of others. ``follows``: the plan
    before had streams too, so its wait for this one counts."""

    num_rows: int
    num_tokens: int
    num_pairs: int
    limit_s: float
    expected_s: float
    is_kept: bool
    follows: bool


class PromisedShare(StreamShare):
    """The account of one worker. A stream without a promise of its own keeps ``rate`` (0 to 1) of
    its rate without prompts, unless its priority is later than 0."""

    def __init__(self, rate: float, capacity: Capacity) -> None:
        self.model = StepModel(capacity)
        self._rate = rate
        self._max_tokens = capacity.max_num_batched_tokens
        self._balance_s = inf
        self._next_limit_s, self._next_is_kept = inf, False
        self._burst_s, self._saved_s = BURST_S, SAVED_S
        self._stretch = 1.0  # time per time of prompts
        self._num_joined = 0  # steps in a row
        self._joined_s = self._held_s = 0.0  # the last step with prompts, and all after it
        self._tokens_per_step = 1.0  # of a stream
        self._in_flight: dict[int, _Shape] = {}
        self._time_s = 0.0  # of all steps
        self._admitted_s: dict[str, float] = {}  # by key, at the last admission

    def decode_s(self, num_rows: int) -> float:
        return self.model.decode_s(num_rows)

    def room(self, streams: list[Sequence], num_wanted: int, num_keys: int, num_next: int) -> Room:
        own_s = self.model.decode_s(len(streams))
        kinds = {(each.options.promise, each.options.priority > 0) for each in streams}
        limit_s = self._limit_s(kinds, own_s)
        self.spare = 1 - own_s / limit_s if limit_s else 1.0
        is_shared = self._rate > 0 and self._has_several_keys()
        if limit_s == inf:
            self._balance_s = self._next_limit_s = inf
            self._stretch = 1.0
            return self._short_step(num_keys, num_next) if is_shared else Room()
        if own_s:
            self._next_limit_s = limit_s
        if num_wanted and self._num_joined >= (MEASURED_EVERY if own_s else FIRST_EVERY):
            return Room(0, num_steps=1)
        if not own_s:
            return Room()
        is_promised = any(_tpot_ms(promise) is not None for promise, _ in kinds)
        self._burst_s = SHORT_BURST_S if is_promised or is_shared else BURST_S
        self._saved_s = 0.0 if is_promised else SAVED_S
        self._stretch = limit_s / (limit_s - own_s)
        longest_s = max(limit_s, self._burst_s)
        room_s = min(limit_s + self._balance_s, longest_s)
        num_tokens = self.model.num_tokens_within(room_s - own_s, num_keys)
        if num_tokens is None or not num_wanted:
            return Room()
        num_kept = self._num_kept(num_next, limit_s - own_s)
        has_waited = self._held_s >= self._joined_s * (1 - MIN_SHARE) / MIN_SHARE
        if num_tokens >= num_wanted or room_s >= ENOUGH * longest_s or has_waited:
            least = max(MIN_TOKENS, self.model.least_tokens)
            return Room(num_tokens if num_tokens >= MIN_TOKENS else least, num_kept)
        if num_kept:
            self._next_is_kept = True
            return Room(0, num_kept)
        return Room(0, num_steps=ceil((longest_s - room_s) / (limit_s - own_s)))

    def _num_kept(self, num_next: int, most_s: float) -> int:
        """The tokens of the next prompt, if they take at most ``most_s``."""
        return num_next if self.model.prompts_s(num_next, num_next**2 / 2) <= most_s else 0

    def _short_step(self, num_keys: int, num_next: int) -> Room:
        """The room in a step of prompts alone, half of which is no fixed cost."""
        least_s = self.model.least_s
        step_s = max(SHORT_BURST_S, 2 * least_s)
        num_tokens = self.model.num_tokens_within(step_s - self.model.decode_s(1), num_keys)
        if num_tokens is None:
            return Room()
        return Room(max(num_tokens, MIN_TOKENS), self._num_kept(num_next, step_s))

    def alone_s(self, num_tokens: float, num_keys: int) -> float:
        num_more = max(0, ceil(num_tokens / self._max_tokens) - 1)  # steps after the first one
        own_s = self.model.prompts_s(num_tokens, num_tokens * num_keys / 2)
        return own_s + num_more * self.model.least_s

    def prompts_s(self, num_tokens: float, num_keys: int) -> float:
        """As ``alone_s``, after the plans in flight and next to the streams of the last one."""
        in_flight_s = sum(each.expected_s for each in self._in_flight.values())
        alone_s = self.alone_s(num_tokens, num_keys)
        saved_s = min(self._balance_s, self._saved_s)
        stretched_s = self._stretch * alone_s - (self._stretch - 1) * saved_s
        return in_flight_s + max(alone_s, stretched_s)

    def note_admission(self, sequence: Sequence) -> None:
        self._admitted_s[sequence.options.owner] = self._time_s

    def _has_several_keys(self) -> bool:
        if len(self._admitted_s) > 1:
            since_s = self._time_s - LINGER_S
            self._admitted_s = {
                owner: time_s for owner, time_s in self._admitted_s.items() if time_s >= since_s
            }
        return len(self._admitted_s) > 1

    def send(self, plan: StepPlan, num_pairs: int) -> None:
        num_rows, num_tokens = len(plan.decode), sum(row.num_tokens for row in plan.prefill)
        if num_rows:
            self._num_joined = self._num_joined + 1 if num_tokens else 0
        limit_s, self._next_limit_s = self._next_limit_s, inf
        is_kept, self._next_is_kept = self._next_is_kept, False
        follows = self._balance_s != inf
        expected_s = self.model.prompts_s(num_tokens, num_pairs)
        if num_rows or num_tokens:
            expected_s += plan.num_steps * self.model.decode_s(max(1, num_rows))
        if limit_s != inf:
            self._add(limit_s, plan.num_steps * limit_s - expected_s)
        self._in_flight[plan.step] = _Shape(
            num_rows=num_rows,
            num_tokens=num_tokens,
            num_pairs=num_pairs,
            limit_s=limit_s,
            expected_s=expected_s,
            is_kept=is_kept,
            follows=follows,
        )

    def note(self, plan: StepPlan, result: StepResult) -> None:
        shape = self._in_flight.pop(plan.step, None)
        self.last_ratio = 0.0
        self._time_s += result.step_s
        if shape is None:
            return
        if shape.expected_s and result.num_steps == plan.num_steps:
            self.last_ratio = result.step_s / shape.expected_s
        if shape.num_tokens and not shape.is_kept:
            self._joined_s, self._held_s = result.step_s, 0.0
        elif shape.num_rows:
            self._held_s += result.step_s
        if shape.num_tokens:
            self.model.note_prompts(
                shape.num_rows, shape.num_tokens, shape.num_pairs, result.step_s
            )
        elif shape.num_rows:
            self.model.note_decode(shape.num_rows, result.step_s / result.num_steps)
            self._note_tokens(result)
        if shape.limit_s != inf and self._balance_s != inf:
            num_left_out = plan.num_steps - result.num_steps
            expected_s = shape.expected_s - num_left_out * shape.limit_s
            idle_s = min(result.idle_s, BURST_S) if shape.follows else 0.0
            self._add(shape.limit_s, expected_s - result.step_s - idle_s)

    def _add(self, limit_s: float, time_s: float) -> None:
        longest_s = max(limit_s, self._burst_s)
        most_s = max(longest_s - limit_s, self._saved_s)
        balance_s = min(self._balance_s, most_s) + time_s
        self._balance_s = max(-MAX_DEBT * longest_s, min(balance_s, most_s))

    def _limit_s(self, kinds: set[tuple[Promise | None, bool]], own_s: float) -> float:
        """The tightest promise in seconds per step, inf without one. ``kinds`` of streams: their
        promises, and if their priority is later than 0."""
        default_s = own_s / self._rate if self._rate else inf
        limit_s = inf
        for promise, is_later in kinds:
            if (tpot_ms := _tpot_ms(promise)) is not None:
                limit_s = min(limit_s, tpot_ms / 1000 * self._tokens_per_step)
            elif not is_later:
                limit_s = min(limit_s, default_s)
        return max(limit_s, own_s / (1 - MIN_SHARE))

    def _note_tokens(self, result: StepResult) -> None:
        runs = [row.run for row in result.rows if row.run.kind == RunKind.OUTPUT]
        if runs:
            mean = sum(run.num_tokens for run in runs) / len(runs)
            self._tokens_per_step += SMOOTHING * (mean - self._tokens_per_step)


def _tpot_ms(promise: Promise | None) -> float | None:
    return promise.tpot_ms if promise is not None else None

"""Predicts the time of a step from its rows. Pure.

A step takes the time of its decoding rows alone, plus that of its prompts. The first part is
measured, by the number of rows. The second part is a fixed cost, a cost per token and a cost per
pair of token and key, fitted to the latest steps by least squares. The ridge decides where the
steps leave a choice: they then differ by their tokens alone.
"""

import numpy as np

from services.scheduler.decode_times import DecodeTimes
from shared.wire.messages import Capacity

KEPT = 31 / 32  # weight of all earlier steps with prompts, at the next one
RIDGE = np.array([0.1, 1e-3, 1e-2])
MOST = 4  # a step that took more than this multiple of its prediction was disturbed


class StepModel(DecodeTimes):
    """Learns from the steps of one worker."""

    def __init__(self, capacity: Capacity) -> None:
        super().__init__()
        self._scale = np.array([1, capacity.max_num_batched_tokens, 0], float)
        self._scale[2] = capacity.max_num_batched_tokens * capacity.max_model_len
        self._squares, self._sums = np.diag(RIDGE), np.zeros(3)
        self._costs: list[float] = []  # fixed, of a token, of a pair

    def note_prompts(self, num_rows: int, num_tokens: int, num_pairs: int, step_s: float) -> None:
        """A step of ``num_rows`` decoding rows and ``num_tokens`` of prompts, which saw
        ``num_pairs`` of token and key in all, took ``step_s``."""
        extra_s = max(0.0, step_s - self.decode_s(max(1, num_rows)))
        if self._costs:
            extra_s = min(extra_s, MOST * self.prompts_s(num_tokens, num_pairs))
        values = np.array([1, num_tokens, num_pairs]) / self._scale
        self._squares = KEPT * self._squares + (1 - KEPT) * np.diag(RIDGE)
        self._squares += np.outer(values, values)
        self._sums = KEPT * self._sums + extra_s * values
        self._costs = (_fit(self._squares, self._sums) / self._scale).tolist()

    def prompts_s(self, num_tokens: float, num_pairs: float) -> float:
        """Returns the time that prompts add to a step, 0 before any step had one."""
        if not self._costs or not num_tokens:
            return 0.0
        fixed_s, token_s, pair_s = self._costs
        return fixed_s + num_tokens * token_s + num_pairs * pair_s

    @property
    def least_s(self) -> float:
        """The time of a step with a single token of a prompt and one decoding row."""
        return self.decode_s(1) + self._costs[0] if self._costs else 0.0

    @property
    def least_tokens(self) -> int:
        """The number of tokens of a prompt that cost as much as the fixed part."""
        fixed_s, token_s, _ = self._costs or (0.0, 1.0, 0.0)
        return int(fixed_s / max(token_s, 1e-9))

    def num_tokens_within(self, time_s: float, num_keys: int) -> int | None:
        """Returns the number of tokens of a prompt, after ``num_keys`` computed ones, that add at
        most ``time_s`` to a step; None before any step had a prompt."""
        if not self._costs:
            return None
        fixed_s, token_s, pair_s = self._costs
        left_s = max(0.0, time_s - fixed_s)
        num_tokens = left_s / max(token_s + num_keys * pair_s, 1e-9)
        return int(left_s / max(token_s + (num_keys + num_tokens / 2) * pair_s, 1e-9))


def _fit(squares: np.ndarray, sums: np.ndarray) -> np.ndarray:
    """Returns the costs, none of them negative."""
    costs, used = np.zeros(3), [0, 1, 2]
    while used:
        solved = np.linalg.solve(squares[np.ix_(used, used)], sums[used])
        if (solved >= 0).all():
            costs[used] = solved
            break
        used.pop(int(solved.argmin()))
    return costs

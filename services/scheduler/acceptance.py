"""Estimates how many drafts are accepted."""

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

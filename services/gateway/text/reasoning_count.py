"""Counts the tokens of reasoning by the places of its markers."""


class ReasoningCount:
    """Places are positions of tokens in the output; the place of a marker in plain text is None."""

    def __init__(self) -> None:
        self._num_counted = 0
        self._open: int | None = None
        self._is_open = False
        self._is_exact = True

    def begin(self, index: int | None) -> None:
        """Reasoning begins after the token at ``index``; -1: with the first token."""
        self._open, self._is_open = index, True

    def end(self, index: int | None) -> None:
        self._is_open = False
        if index is None or self._open is None:
            self._is_exact = False
        else:
            self._num_counted += index - self._open - 1

    def total(self, num_tokens: int) -> int | None:
        """The reasoning tokens among ``num_tokens``; None if a marker's place is unknown."""
        if not self._is_exact or (self._is_open and self._open is None):
            return None
        if not self._is_open or self._open is None:
            return self._num_counted
        return self._num_counted + max(0, num_tokens - self._open - 1)

"""Matches an answer against its grammar."""

from collections.abc import Sequence
from itertools import takewhile

import numpy as np
from llguidance import LLMatcher

from services.worker.guides.grammars import Compiled, GrammarError, first_line
from services.worker.slots.guide import NotCompiled


class AnswerMatcher:
    """Its state is a function of the grammar and ``ids``. ``error`` is the reason why the answer
    cannot go on; ``is_too_complex``: the grammar is the cause."""

    def __init__(self, compiled: Compiled, vocab_size: int) -> None:
        self.ids: list[int] = []
        self.error: str | None = None
        self.is_too_complex = False
        self._compiled, self._vocab_size = compiled, vocab_size
        is_id = np.arange(-(-vocab_size // 32) * 32) < vocab_size
        self._ids_mask = np.packbits(is_id, bitorder="little").view(np.int32)
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0  # ids consumed by the matcher

    def mask(self, drafts: Sequence[int], end_mask: np.ndarray) -> np.ndarray | None:
        """The ids allowed after ``ids`` and ``drafts``, as in ``SlotGuide.mask``; after a complete
        answer also ``end_mask``. None if the drafts are not allowed. Raises NotCompiled."""
        matcher = self._follow()
        if matcher is None:
            return np.zeros_like(self._ids_mask)
        num_valid = matcher.try_consume_tokens(list(drafts)) if drafts else 0
        if num_valid == len(drafts):
            known = np.frombuffer(matcher.compute_bitmask(), np.int32)  # may be more than V
            mask = known[: len(self._ids_mask)] & self._ids_mask
            if matcher.is_accepting():
                mask |= end_mask
        if matcher.is_error():
            return self._fail(matcher, len(drafts))
        matcher.rollback(num_valid)
        return mask if num_valid == len(drafts) else None

    def forced(self) -> list[int]:
        """The ids after ``ids`` determined by the grammar, as a tokenizer would split them, up to
        one that the model lacks."""
        try:
            matcher = self._follow()
        except NotCompiled:
            return []
        if matcher is None:
            return []
        found = matcher.compute_ff_tokens()
        if matcher.is_error():
            self._matcher = None
        return [*takewhile(lambda each: each < self._vocab_size, found)]

    def _follow(self) -> LLMatcher | None:
        """The matcher after ``ids``, or None after an error. Raises NotCompiled."""
        if self.error is not None:
            return None
        try:
            if self._matcher is None:
                self._matcher = self._compiled.start().deep_copy()
                self._num_consumed = 0
            ids = self.ids[self._num_consumed :]
            if ids and self._matcher.try_consume_tokens(ids) < len(ids):
                self._blame(self._matcher)
        except GrammarError as error:
            self.error = str(error)
        self._num_consumed = len(self.ids)
        return self._matcher if self.error is None else None

    def _fail(self, matcher: LLMatcher, num_drafts: int) -> np.ndarray:
        """Returns a mask without ids. A matcher that failed at drafts tells nothing about the
        output: it is made anew."""
        if num_drafts:
            self._matcher = None
        else:
            self._blame(matcher)
        return np.zeros_like(self._ids_mask)

    def _blame(self, matcher: LLMatcher) -> None:
        """Without an error of its own the matcher has only refused an id."""
        self.is_too_complex = matcher.is_error()
        self.error = "its text left its grammar"
        if self.is_too_complex:
            self.error = f"its grammar is too complex: {first_line(matcher.get_error())}"

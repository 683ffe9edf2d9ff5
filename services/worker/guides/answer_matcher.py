"""Follows an answer in its grammar."""

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher

from services.worker.guides.grammars import Compiled, GrammarError, NotCompiled, first_line


class AnswerMatcher:
    """Is a function of the grammar and of ``ids``. ``error`` is why the answer cannot go on, and
    ``is_too_complex`` that its grammar is to blame."""

    def __init__(self, compiled: Compiled, vocab_size: int) -> None:
        self.ids: list[int] = []
        self.error: str | None = None
        self.is_too_complex = False
        self._compiled = compiled
        is_id = np.arange(-(-vocab_size // 32) * 32) < vocab_size
        self._ids_mask = np.packbits(is_id, bitorder="little").view(np.int32)
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0  # of ids, by the matcher

    def mask(self, drafts: Sequence[int], end_mask: np.ndarray) -> np.ndarray | None:
        """Which ids may come after ``ids`` and ``drafts``, see ``SlotGuide``; a complete answer
        admits those of ``end_mask``, too. None where the drafts may not come. Raises
        NotCompiled."""
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
        """The ids that the grammar says will follow ``ids``, as a tokenizer would write them."""
        try:
            matcher = self._follow()
        except NotCompiled:
            return []
        if matcher is None:
            return []
        found = matcher.compute_ff_tokens()
        if matcher.is_error():
            self._matcher = None
        return found

    def _follow(self) -> LLMatcher | None:
        """The matcher after ``ids``, or None where there is an error. Raises NotCompiled."""
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
        """Nothing may come. A matcher that failed at drafts says nothing of the text: it is made
        anew."""
        if num_drafts:
            self._matcher = None
        else:
            self._blame(matcher)
        return np.zeros_like(self._ids_mask)

    def _blame(self, matcher: LLMatcher) -> None:
        """A matcher without an error of its own has only not taken an id."""
        self.is_too_complex = matcher.is_error()
        self.error = "its text left its grammar"
        if self.is_too_complex:
            self.error = f"its grammar is too complex: {first_line(matcher.get_error())}"

"""Which ids may come next in the text of a slot."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future

import numpy as np
from llguidance import LLMatcher

from services.worker.guides.answer_matcher import AnswerMatcher
from services.worker.guides.gate import Gate, GateRules, Phase
from services.worker.guides.grammars import Compiled
from shared.wire.messages import Guide


class SlotGuide:
    """Holds a text to a Guide. Its state is a function of that and of the ids that were emitted,
    whether they came one by one or with the admission."""

    def __init__(
        self,
        guide: Guide,
        compiled: Compiled | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        stop_ids: Sequence[int],
    ) -> None:
        """``compiled``: None where the guide has no grammar. ``stop_ids`` are the request's."""
        ends = frozenset([*eos_ids, *stop_ids])
        self._rules = GateRules.of(guide, ends)
        self._gate: Gate = self._rules.first
        self._compiled = compiled
        self._answer = None if compiled is None else AnswerMatcher(compiled, vocab_size)
        self._vocab_size = vocab_size
        self._end_mask = self._pack(ends)
        self._open_mask = self._pack(self._rules.open_ids)
        self._reasoning_mask = ~self._pack(frozenset(eos_ids) - self._rules.close_ids)
        self._masks: dict[tuple[int, ...], np.ndarray | None] = {}  # by drafts

    @property
    def error(self) -> str | None:
        """Why the text cannot go on; then its masks hide every id."""
        return None if self._answer is None else self._answer.error

    @property
    def is_too_complex(self) -> bool:
        """Whether that is what is wrong with its grammar."""
        return self._answer is not None and self._answer.is_too_complex

    @property
    def awaited(self) -> Future[LLMatcher] | None:
        """The compilation that the next token waits for."""
        if self._compiled is None or self._compiled.future.done():
            return None
        if self._gate.phase in (Phase.REASONING, Phase.ENDED):
            return None
        return self._compiled.future

    def note(self, token_ids: Iterable[int]) -> None:
        """``token_ids`` are emitted."""
        self._masks.clear()
        self._gate, answer = self._follow(token_ids)
        if self._answer is not None:
            self._answer.ids += answer

    def mask(self, drafts: Sequence[int]) -> np.ndarray | None:
        """Which ids may come after ``drafts``, which follow what was emitted: [⌈V / 32⌉] int32, id
        i as bit i % 32 of word i // 32; None: all. After drafts that may not come it is of no
        meaning. Raises NotCompiled."""
        key = tuple(drafts)
        if key not in self._masks:
            self._masks[key] = self._make_mask(key)
        return self._masks[key]

    def forced(self) -> list[int]:
        """The next ids as far as there is no choice: good drafts. It may be that others write the
        same text."""
        if self._gate.phase is Phase.REASONING:
            return self._rules.forced_ids_from(self._gate)
        if self._answer is None or self._gate.phase is not Phase.ANSWER:
            return []
        return self._answer.forced()

    def leaves_ends_only(self, mask: np.ndarray) -> bool:
        return not (mask & ~self._end_mask).any()

    def _follow(self, token_ids: Iterable[int]) -> tuple[Gate, list[int]]:
        """The gate after ``token_ids``, and which of them are the grammar's."""
        gate, answer = self._gate, []
        for token_id in token_ids:
            before, gate = gate.phase, self._rules.after(gate, token_id)
            if gate.phase is Phase.ANSWER and before is not Phase.REASONING:
                answer.append(token_id)
        return gate, answer

    def _make_mask(self, drafts: Sequence[int]) -> np.ndarray | None:
        gate, answer = self._follow(drafts)
        if forced := self._rules.forced_ids_from(gate):
            return self._pack(forced[:1])
        if self._answer is None:
            return None
        if gate.phase is Phase.ENDED:
            return self._end_mask
        if gate.phase is Phase.REASONING:  # it leads to an answer
            return self._reasoning_mask
        mask = self._answer.mask(answer, self._end_mask)
        if gate.phase is Phase.UNDECIDED and mask is not None and self.error is None:
            mask |= self._open_mask
        return mask

    def _pack(self, ids: Iterable[int]) -> np.ndarray:
        bits = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        bits[[each for each in ids if each < self._vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)

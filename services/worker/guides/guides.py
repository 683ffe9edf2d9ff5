"""The allowed next ids of the outputs of slots."""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from llguidance import LLMatcher

from services.worker.guides.answer_matcher import AnswerMatcher
from services.worker.guides.gate import Gate, GateRules, Phase
from services.worker.guides.grammars import Compiled, Grammars
from shared.wire.messages import Guide, SamplingParams


class SlotGuide:
    """Constrains an output to a Guide. Its state is a function of the Guide and the emitted ids,
    however they arrived."""

    def __init__(
        self,
        guide: Guide,
        compiled: Compiled | None,
        vocab_size: int,
        eos_ids: Sequence[int],
        stop_ids: Sequence[int],
    ) -> None:
        """``compiled``: None without a grammar. ``stop_ids`` are the request's."""
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
        """The reason why the output cannot go on; its masks then hide every id."""
        return None if self._answer is None else self._answer.error

    @property
    def is_too_complex(self) -> bool:
        """True if the grammar's complexity is the error."""
        return self._answer is not None and self._answer.is_too_complex

    @property
    def awaited(self) -> Future[LLMatcher] | None:
        """The compilation the next token waits for."""
        if self._compiled is None or self._compiled.future.done():
            return None
        if self._gate.phase in (Phase.REASONING, Phase.ENDED):
            return None
        return self._compiled.future

    def note(self, token_ids: Iterable[int]) -> None:
        """``token_ids`` were emitted."""
        self._masks.clear()
        self._gate, answer = self._follow(token_ids)
        if self._answer is not None:
            self._answer.ids += answer

    def mask(self, drafts: Sequence[int]) -> np.ndarray | None:
        """The ids allowed after the output and ``drafts``: [⌈V / 32⌉] int32, id i as bit i % 32 of
        word i // 32; None: all. Undefined after drafts that are not allowed. Raises NotCompiled."""
        key = tuple(drafts)
        if key not in self._masks:
            self._masks[key] = self._make_mask(key)
        return self._masks[key]

    def forced(self) -> list[int]:
        """The next ids without an alternative: good drafts. Other ids may spell the same text."""
        if self._gate.phase is Phase.REASONING:
            return self._rules.forced_ids_from(self._gate)
        if self._answer is None or self._gate.phase is not Phase.ANSWER:
            return []
        return self._answer.forced()

    def leaves_ends_only(self, mask: np.ndarray) -> bool:
        return not (mask & ~self._end_mask).any()

    def _follow(self, token_ids: Iterable[int]) -> tuple[Gate, list[int]]:
        """The gate after ``token_ids``, and the ids among them that belong to the grammar."""
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


class Guides:
    """Makes the guides of sequences. ``folder`` is the model's; ``eos_ids`` [E] int64 are all ids
    that end a text."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: np.ndarray) -> None:
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids.tolist()
        self.grammars = Grammars(folder, vocab_size, tuple(self._eos_ids))

    def begin(self, params: SamplingParams, emitted: np.ndarray) -> SlotGuide | None:
        """The guide of a sequence with ``params`` that has ``emitted`` [n] ids. Its grammar is
        queued at once; there are no masks until it is compiled."""
        guide = params.guide
        if guide is None:
            return None
        compiled = self.grammars.compile(guide.grammar) if guide.grammar else None
        slot_guide = SlotGuide(
            guide, compiled, self._vocab_size, self._eos_ids, params.stop_token_ids
        )
        slot_guide.note(emitted.tolist())
        return slot_guide

"""The guides of sequences, as a slot table makes them."""

from pathlib import Path

import numpy as np

from services.worker.guides.grammars import Grammars
from services.worker.guides.slot_guide import SlotGuide
from shared.wire.messages import SamplingParams


class Guides:
    """``folder`` is the model's; ``eos_ids`` [E] int64 are all ids that end a text."""

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

"""The text of one choice: ids in, deltas out, until a stop string or the end. Pure."""

from collections.abc import Sequence

from services.tokenizer.detokenize import Decode, Detokenizer
from services.tokenizer.stops import StopMatcher


class TextStream:
    """Joins incremental decoding and stop strings.

    ``num_tokens`` counts the ids that went in until the text stopped.
    """

    def __init__(self, decode: Decode, stops: list[str]) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(stops)
        self._looks_at_each_id = bool(stops)
        self.num_tokens = 0

    @property
    def has_stopped(self) -> bool:
        return self._matcher.has_stopped

    def push(self, ids: Sequence[int]) -> str:
        """Text that can go out. Ids after the one that completed a stop string are not counted."""
        pieces = [[each] for each in ids] if self._looks_at_each_id else [ids]
        text = ""
        for piece in pieces:
            if self.has_stopped:
                break
            self.num_tokens += len(piece)
            text += self._matcher.push(self._detokenizer.push(piece))
        return text

    def finish(self) -> str:
        """The text held back, when the model has ended the sequence."""
        text = self._matcher.push(self._detokenizer.flush())
        return text if self.has_stopped else text + self._matcher.flush()

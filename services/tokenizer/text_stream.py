"""The text of one choice: ids in, deltas out, until a stop string or the end. Pure."""

from collections.abc import Sequence

from services.tokenizer.detokenize import DecodeIds, Detokenizer
from services.tokenizer.stops import StopMatcher


class TextStream:
    """Joins incremental decoding and stop strings, which end behind the first ``min_tokens``.

    ``num_tokens`` counts the ids that went in until the text stopped.
    """

    def __init__(
        self,
        decode: DecodeIds,
        stops: Sequence[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(list(stops), includes_stop)
        self._looks_at_each_id = bool(stops)
        self._min_tokens = min_tokens
        self.num_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.match

    def push(self, ids: Sequence[int], last_is_textless: bool = False) -> str:
        """Text that can go out. Ids after the one that completed a stop string are not counted.

        ``last_is_textless``: the last id counts, but has no text.
        """
        spoken = ids[:-1] if last_is_textless else ids
        pieces = [[each] for each in spoken] if self._looks_at_each_id else [spoken]
        text = ""
        for piece in pieces:
            if self.stop is not None:
                return text
            self.num_tokens += len(piece)
            text += self._match(self._detokenizer.push(piece))
        self.num_tokens += last_is_textless and self.stop is None
        return text

    def finish(self) -> str:
        """The text held back, when the model has ended the sequence."""
        text = self._match(self._detokenizer.flush())
        return text if self.stop is not None else text + self._matcher.flush()

    def _match(self, text: str) -> str:
        return self._matcher.push(text, is_exempt=self.num_tokens <= self._min_tokens)

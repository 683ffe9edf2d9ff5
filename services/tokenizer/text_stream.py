"""The text of one choice: ids in, deltas out, until a stop string or the end. Pure."""

from collections.abc import Mapping, Sequence

from services.tokenizer.detokenize import DecodeIds, Detokenizer
from services.tokenizer.marks import Marks
from services.tokenizer.stops import StopMatcher
from shared.messages import Mark


class TextStream:
    """Joins incremental decoding and stop strings, which end behind the first ``min_tokens``.

    ``num_tokens`` counts the ids that went in until the text stopped. With ``added``, the texts of
    the vocabulary's added tokens, there are Marks of them.
    """

    def __init__(
        self,
        decode: DecodeIds,
        stops: Sequence[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
        added: Mapping[int, str] | None = None,
    ) -> None:
        self._detokenizer = Detokenizer(decode)
        self._matcher = StopMatcher(list(stops), includes_stop)
        self._marks = None if added is None else Marks(added)
        # One by one, marks and stop strings are where they are however the ids come.
        self._looks_at_each_id = bool(stops) or added is not None
        self._min_tokens = min_tokens
        self._num_out = 0
        self.num_tokens = 0

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._matcher.match

    def push(self, ids: Sequence[int], last_is_textless: bool = False) -> str:
        """Text that can go out. Ids after the one that completed a stop string are not counted.

        ``last_is_textless``: the last id counts, but has no text, and ends the text.
        """
        spoken = ids[:-1] if last_is_textless else ids
        pieces = [[each] for each in spoken] if self._looks_at_each_id else [spoken]
        text = ""
        for piece in pieces:
            if self.stop is not None:
                return text
            text += self._push(piece)
        if last_is_textless and self.stop is None:
            text += self._end_with(ids[-1])
        return text

    def finish(self) -> str:
        """The text held back, when the model has ended the sequence."""
        text = self._match(self._flush())
        return text if self.stop is not None else text + self._count(self._matcher.flush())

    def take_marks(self) -> list[Mark]:
        """Those that belong to text that is out, and were not taken yet."""
        return [] if self._marks is None else self._marks.take(self._num_out)

    def _push(self, ids: Sequence[int]) -> str:
        new = self._detokenizer.push(ids)
        if self._marks is not None:
            self._marks.note(new, self.num_tokens, ids[0])
        self.num_tokens += len(ids)
        return self._match(new)

    def _end_with(self, token_id: int) -> str:
        """The text that was held back, which comes before the last token."""
        self.num_tokens += 1
        if self._marks is None:
            return ""
        text = self.finish()
        if self.stop is None:
            self._marks.note_textless(self.num_tokens - 1, token_id)
        return text

    def _flush(self) -> str:
        new = self._detokenizer.flush()
        if self._marks is not None:
            self._marks.note_text(new)
        return new

    def _match(self, text: str) -> str:
        return self._count(self._matcher.push(text, is_exempt=self.num_tokens <= self._min_tokens))

    def _count(self, text: str) -> str:
        self._num_out += len(text)
        return text

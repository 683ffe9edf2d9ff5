"""The text of one choice: ids in, deltas out, until a stop string or the end. Pure."""

from collections.abc import Container, Iterator, Mapping, Sequence

from services.tokenizer.detokenize import NO_SEAM, DecodeIds, Detokenizer, Seam
from services.tokenizer.marks import Marks
from services.tokenizer.stops import StopMatcher
from shared.wire.messages import Mark


class TextStream:
    """Joins incremental decoding and stop strings, which end behind the first ``min_tokens``.

    ``num_tokens`` counts the ids that went in until the text stopped. With ``added``, the texts of
    the vocabulary's added tokens, there are Marks of them; ``partial_ids`` are the ids of tokens
    that are no whole characters. The text goes on from its prompt at ``seam``.
    """

    def __init__(
        self,
        decode: DecodeIds,
        stops: Sequence[str] = (),
        includes_stop: bool = False,
        min_tokens: int = 0,
        added: Mapping[int, str] | None = None,
        partial_ids: Container[int] = (),
        seam: Seam = NO_SEAM,
    ) -> None:
        self._detokenizer = Detokenizer(decode, seam)
        self._matcher = StopMatcher(list(stops), includes_stop)
        self._marks = None if added is None else Marks(added)
        self._added = added
        self._partial_ids = partial_ids
        self._looks_at_each_id = bool(stops)
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
        text = ""
        for piece in self._pieces(spoken):
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

    def _pieces(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Parts of ``ids`` whose text and marks are the same however the ids come: what is an added
        token, or a part of a character, is a part of its own."""
        if self._added is None and not self._looks_at_each_id:
            yield ids
            return
        begin = 0
        for index, token_id in enumerate(ids):
            if self._is_alone(token_id):
                if begin < index:
                    yield ids[begin:index]
                yield ids[index : index + 1]
                begin = index + 1
        if begin < len(ids):
            yield ids[begin:]

    def _is_alone(self, token_id: int) -> bool:
        is_added = self._added is not None and token_id in self._added
        return self._looks_at_each_id or is_added or token_id in self._partial_ids

    def _push(self, ids: Sequence[int]) -> str:
        new = self._detokenizer.push(ids)
        if self._marks is not None:
            self._marks.note(new, self.num_tokens, ids)
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

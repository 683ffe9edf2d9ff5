"""One choice of an open request: its text, and the part that its client lacks."""

from collections.abc import Sequence

from services.tokenizer.text_stream import TextStream
from shared.wire.messages import Mark


class OpenChoice:
    """The text of one sequence, continued after the text delivered by an earlier attempt.

    From its first token on, ``num_cached`` ids of its prompt came from the cache; the logprobs of
    ``num_prompt_scored`` prompt tokens have arrived.
    Decoding the ``resumed`` ids again gives the delivered text, ``num_chars`` and ``num_marks`` of
    it, and the text held back; only the text after it comes out.
    """

    def __init__(
        self,
        index: int,
        stream: TextStream,
        resumed: Sequence[int],
        num_chars: int,
        num_prompt_scored: int = 0,
        num_marks: int = 0,
    ) -> None:
        self.index = index
        self.num_cached = 0
        self.num_prompt_scored = num_prompt_scored
        self._stream = stream
        self._num_to_skip = num_chars
        self._unsent = self._skip(stream.push(resumed)) if resumed else ""
        self._unsent_marks = stream.take_marks()[num_marks:]

    @property
    def num_tokens(self) -> int:
        return self._stream.num_tokens

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stream.stop

    def push(self, ids: Sequence[int], last_is_textless: bool) -> str:
        """Text that can go out; see TextStream.push."""
        return self._take(self._stream.push(ids, last_is_textless))

    def finish(self) -> str:
        return self._take(self._stream.finish())

    def take_marks(self) -> list[Mark]:
        """The marks that go out with the text of the last push or finish."""
        marks, self._unsent_marks = self._unsent_marks + self._stream.take_marks(), []
        return marks

    def _take(self, text: str) -> str:
        text, self._unsent = self._unsent + self._skip(text), ""
        return text

    def _skip(self, text: str) -> str:
        num_skipped = min(self._num_to_skip, len(text))
        self._num_to_skip -= num_skipped
        return text[num_skipped:]

"""The text of one choice: ids in, deltas out, until a stop string or the end. Pure."""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence

from services.tokenizer.detokenize import NO_SEAM, DecodeIds, Detokenizer, Seam
from shared.wire.messages import Mark


class TextStream:
    """Joins incremental decoding and stop strings, which end after the first ``min_tokens``.

    ``num_tokens`` counts the input ids until the text stopped. ``added``, the texts of the
    vocabulary's added tokens, turns on their Marks; tokens of ``partial_ids`` are not whole
    characters. The text continues its prompt at ``seam``.
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
        """The marks of text that is out, each taken once."""
        return [] if self._marks is None else self._marks.take(self._num_out)

    def _pieces(self, ids: Sequence[int]) -> Iterator[Sequence[int]]:
        """Parts of ``ids`` with text and marks that do not depend on the arrival of the ids: an
        added token, or a part of a character, is a part of its own."""
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


class Marks:
    """The Marks of one text, which wait until the text in front of them is out.

    ``added`` has the text of each added token, empty if it is not shown.
    """

    def __init__(self, added: Mapping[int, str]) -> None:
        self._added = added
        self._num_decoded = 0
        self._waiting: deque[Mark] = deque()

    def note(self, new: str, index: int, ids: Sequence[int]) -> None:
        """``ids``, from token ``index`` on, made the text ``new`` certain. An added token comes
        alone, and ``new`` ends with its text."""
        self.note_text(new)
        shown = self._added.get(ids[0])
        if shown is not None:
            num_chars = len(shown) if new.endswith(shown) else len(new)
            self._waiting.append(Mark(self._num_decoded - num_chars, num_chars, index, ids[0]))

    def note_text(self, new: str) -> None:
        """``new`` became certain without a token."""
        self._num_decoded += len(new)

    def note_textless(self, index: int, token_id: int) -> None:
        """Token ``index``, of any kind, ends the text and has no text itself."""
        if token_id in self._added:
            self._waiting.append(Mark(self._num_decoded, 0, index, token_id))

    def take(self, num_out: int) -> list[Mark]:
        """The marks that can go out with the first ``num_out`` characters of the text."""
        taken = []
        while self._waiting and _can_go(self._waiting[0], num_out):
            taken.append(self._waiting.popleft())
        return taken


def _can_go(mark: Mark, num_out: int) -> bool:
    """A shown token's mark waits for its first character: a stop string may still cut it off."""
    return mark.position < num_out or (mark.position == num_out and mark.num_chars == 0)


class StopMatcher:
    """Passes text through until one of ``stops`` appears; ``includes_stop`` lets it through too.

    A tail that may be the beginning of a stop string is held back until the next piece decides.
    The match that ends first wins; of two that end together, the longer. No match ends in a mute
    piece, but one may begin there.
    """

    def __init__(self, stops: list[str], includes_stop: bool = False) -> None:
        self._stops = stops
        self._includes_stop = includes_stop
        self._max_len = max(map(len, stops), default=0)
        self._held = ""
        self._num_exempt = 0  # characters of the held text
        self.match: str | None = None

    def push(self, text: str, is_exempt: bool = False) -> str:
        """The part of the text so far that can go out now; sets ``match`` to a stop string."""
        if not self._stops:
            return text
        text = self._held + text
        if is_exempt:
            self._num_exempt = len(text)
        found = self._first_match(text)
        if found is not None:
            (start, end), self._held = found, ""
            self.match = text[start:end]
            return text[: end if self._includes_stop else start]
        keep = self._num_to_hold(text)
        self._held = text[len(text) - keep :]
        self._num_exempt = max(0, self._num_exempt - (len(text) - keep))
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        text, self._held = self._held, ""
        return text

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """The position of the stop string that ends first."""
        num = self._num_exempt
        matches = [(text.find(stop, max(0, num - len(stop) + 1)), stop) for stop in self._stops]
        found = [(start + len(stop), start) for start, stop in matches if start >= 0]
        if not found:
            return None
        end, start = min(found)
        return start, end

    def _num_to_hold(self, text: str) -> int:
        """Length of the longest tail of ``text`` that begins a stop string."""
        for length in range(min(self._max_len - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0

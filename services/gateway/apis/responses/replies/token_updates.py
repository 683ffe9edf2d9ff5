"""Splits updates into one for each token, so that each token's text is known."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from shared.wire.messages import NO_TOKENS, Mark, TokenRun
from shared.wire.token_arrays import TokenArrays


class TokenUpdates:
    """Divides the text by its marks, and between them by the bytes of the tokens. A token comes out
    when its text is there: part of a character, or a possible beginning of a stop string, comes
    later than its token."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._tokens: deque[ChoiceUpdate] = deque()
        self._marks: deque[Mark] = deque()
        self._text = ""
        self._num_out = 0
        self._num_chars_out = 0
        self._num_spare = 0  # bytes of tokens that are out, of a character that is not

    def split(self, update: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
        """An update that ends the choice is the last, with the rest of the text."""
        self._marks += update.marks
        self._tokens += _single(update)
        self._text += update.text
        is_over = update.finished is not None
        while self._tokens and (num_chars := self._next_chars(is_over)) is not None:
            yield self._take(self._tokens.popleft(), num_chars)
            self._num_out += 1
        if is_over:
            last = replace(update, run=NO_TOKENS, arrays=TokenArrays())
            yield self._take(last, len(self._text))

    def _next_chars(self, is_over: bool) -> int | None:
        """The number of characters written by the next token; None: not known yet."""
        end = self._known_end()
        text = self._text[:end]
        if end is not None and (is_over or len(text) == end):
            num_chars = len(text) if self._ends_at_mark() else self._chars_of_token(text)
            return len(text) if num_chars is None else num_chars
        num_chars = self._chars_of_token(text)
        return len(text) if num_chars is None and is_over else num_chars

    def _known_end(self) -> int | None:
        """The position in the remaining text at which the next mark begins, or ends if the next
        token is the mark's own."""
        if not self._marks:
            return None
        mark = self._marks[0]
        num_own = mark.num_chars if mark.index == self._num_out else 0
        return mark.position + num_own - self._num_chars_out

    def _ends_at_mark(self) -> bool:
        return bool(self._marks) and self._marks[0].index <= self._num_out + 1

    def _chars_of_token(self, text: str) -> int | None:
        """By its bytes; None: it may have written more than ``text``."""
        written = self._table.written(int(self._tokens[0].arrays.ids[0]))
        num_bytes = self._num_spare + len(written)
        if not self._num_out and written.startswith(b" ") and text[:1] not in ("", " "):
            num_bytes -= 1  # some decoders strip the blank that a text begins with
        num_chars = 0
        for char in text:
            size = len(char.encode())
            if size > num_bytes:
                break
            num_bytes -= size
            num_chars += 1
        else:
            if num_bytes:
                return None
        self._num_spare = num_bytes
        return num_chars

    def _take(self, token: ChoiceUpdate, num_chars: int) -> ChoiceUpdate:
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        self._num_chars_out += num_chars
        marks = []
        while self._marks and (self._marks[0].index <= self._num_out or token.finished is not None):
            marks.append(self._marks.popleft())
            self._num_spare = 0
        return replace(token, text=text, marks=marks)


def _single(update: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
    """One update for each token, without text."""
    run, arrays = update.run, update.arrays
    has_values = int(run.num_values > 0)
    for index in range(run.num_tokens):
        yield ChoiceUpdate(
            update.index,
            "",
            TokenRun(1, run.num_values, run.num_top_ids),
            TokenArrays(
                arrays.ids[index : index + 1],
                arrays.values[index * run.num_values : (index + 1) * run.num_values],
                arrays.top_ids[index * run.num_top_ids : (index + 1) * run.num_top_ids],
                arrays.ranks[index : index + has_values],
            ),
            None,
        )

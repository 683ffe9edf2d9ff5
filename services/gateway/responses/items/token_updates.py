"""Updates of one token each, whatever came at once, so that each token's text is known."""

from collections import deque
from collections.abc import Iterator
from dataclasses import replace

from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from shared.messages import NO_TOKENS, Mark, TokenRun
from shared.token_arrays import TokenArrays


class TokenUpdates:
    """Divides the text by the bytes of the tokens. A token comes out when its text is there: a part
    of a character, or what may become a stop string, is there later than its token."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._tokens: deque[ChoiceUpdate] = deque()
        self._marks: deque[Mark] = deque()
        self._hidden: set[int] = set()  # numbers of tokens that have no text
        self._text = ""
        self._num_out = 0
        self._num_chars_out = 0
        self._num_spare = 0  # bytes of tokens that are out, of a character that is not

    def split(self, update: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
        """An update that ends the choice is the last, with what is left of the text."""
        self._marks += update.marks
        self._hidden.update(mark.index for mark in update.marks if not mark.num_chars)
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
        """How many characters the next token has written; None: that cannot be told yet."""
        written = b""
        if self._num_out not in self._hidden:
            written = self._table.written(self._tokens[0].arrays.ids[0])
        num_bytes = self._num_spare + len(written)
        if not self._num_out and written.startswith(b" ") and self._text[:1] not in ("", " "):
            num_bytes -= 1  # some decoders strip the blank that a text begins with
        num_chars = 0
        for char in self._text:
            size = len(char.encode())
            if size > num_bytes:
                break
            num_bytes -= size
            num_chars += 1
        else:
            if num_bytes and not is_over:
                return None
        self._num_spare = num_bytes
        return num_chars

    def _take(self, token: ChoiceUpdate, num_chars: int) -> ChoiceUpdate:
        text, self._text = self._text[:num_chars], self._text[num_chars:]
        self._num_chars_out += num_chars
        marks = []
        while self._marks and self._is_out(self._marks[0], token):
            marks.append(self._marks.popleft())
        return replace(token, text=text, marks=marks)

    def _is_out(self, mark: Mark, token: ChoiceUpdate) -> bool:
        return mark.index <= self._num_out or token.finished is not None


def _single(update: ChoiceUpdate) -> Iterator[ChoiceUpdate]:
    """One for each token, without text."""
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

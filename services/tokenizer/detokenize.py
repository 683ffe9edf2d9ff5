"""Token ids to text, piece by piece, never half a character. Pure."""

from collections.abc import Callable, Sequence

MAX_WINDOW_TOKENS = 64
PIECE_TOKENS = 16  # of many ids that come at once, so that the window stays short
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one growing list of ids.

    The text of a token depends on its neighbours (a space, the rest of a character), so each piece
    is the difference between decoding a short window with and without the new ids. A decoder
    writes a character that is incomplete as one replacement character at the end, which is held
    back. A long window that ends in one moves past the ids whose text is out, so that it stays
    short; where there are none it cannot be text and is given up.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._context: list[int] = []  # ids whose text is out, as many as the next ones depend on
        self._window: list[int] = []
        self._num_out = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now certain; empty while a character is incomplete."""
        starts = range(0, len(ids), PIECE_TOKENS)
        return "".join(self._push(ids[start : start + PIECE_TOKENS]) for start in starts)

    def _push(self, ids: Sequence[int]) -> str:
        self._window.extend(ids)
        text = self._text_of(self._window)
        if not text.endswith(REPLACEMENT):
            return self._move_on(text)
        certain = text[:-1]
        new = certain[self._num_out :]
        self._num_out = len(certain)
        if len(self._window) >= MAX_WINDOW_TOKENS and not self._move_past_certain():
            return new + self._move_on(text)
        return new

    def flush(self) -> str:
        """The rest, with a replacement character where the last character stayed incomplete."""
        return self._move_on(self._text_of(self._window))

    def _text_of(self, ids: Sequence[int]) -> str:
        """What ``ids``, the window or its beginning, add to the context's text."""
        if not ids:
            return ""
        return self._decode([*self._context, *ids])[len(self._decode(self._context)) :]

    def _move_past_certain(self) -> bool:
        """Makes as many ids as possible the context; whether there are such.

        A character that they leave incomplete is one of those that are out: the window goes on
        behind it.
        """
        for end in range(len(self._window) - 1, 0, -1):
            num_characters = len(self._text_of(self._window[:end]))
            if 0 < num_characters <= self._num_out:
                self._context, self._window = self._window[:end], self._window[end:]
                self._num_out -= num_characters
                return True
        return False

    def _move_on(self, text: str) -> str:
        new = text[self._num_out :]
        if text:
            self._context, self._window, self._num_out = self._window, [], 0
        elif len(self._window) >= MAX_WINDOW_TOKENS:
            self._window = []  # special tokens only: nothing depends on them
        return new

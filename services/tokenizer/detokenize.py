"""Token ids to text, piece by piece, never half a character. Pure."""

from collections.abc import Callable, Sequence

MAX_WINDOW_TOKENS = 64
PIECE_TOKENS = 16  # of many ids that come at once, so that only what is undecided fills the window
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Decode = Callable[[Sequence[int]], str]


class Detokenizer:
    """Text of one growing list of ids.

    The text of a token depends on its neighbours (a space, the rest of a character), so each piece
    is the difference between decoding a short window with and without the new ids. A decoder
    writes a character that is incomplete as one replacement character at the end, which is held
    back. A window that stays incomplete for so long that it cannot be text is given up, so that it
    stays short.
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
        text = self._window_text()
        if text.endswith(REPLACEMENT) and len(self._window) < MAX_WINDOW_TOKENS:
            certain = text[:-1]
            new, self._num_out = certain[self._num_out :], len(certain)
            return new
        return self._move_on(text)

    def flush(self) -> str:
        """The rest, with a replacement character where the last character stayed incomplete."""
        return self._move_on(self._window_text())

    def _window_text(self) -> str:
        if not self._window:
            return ""
        return self._decode(self._context + self._window)[len(self._decode(self._context)) :]

    def _move_on(self, text: str) -> str:
        new = text[self._num_out :]
        if text:
            self._context, self._window, self._num_out = self._window, [], 0
        elif len(self._window) >= MAX_WINDOW_TOKENS:
            self._window = []  # special tokens only: nothing depends on them
        return new

"""Writes an answer as it arrives; at a terminal tokens may be coloured by probability."""

import math
import sys

from rich.console import Console
from rich.text import Text

from cli.console import printable
from cli.talk.pieces import TextPiece


class Printer:
    """Writes to stdout. With ``colours``, and at a terminal, certain tokens are green and
    improbable ones red."""

    def __init__(self, colours: bool) -> None:
        self._console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._colours = colours
        self._was_reasoning = False

    @property
    def is_terminal(self) -> bool:
        return self._console.is_terminal

    def write(self, piece: TextPiece) -> None:
        if not self.is_terminal:
            if not piece.is_reasoning:
                sys.stdout.write(piece.text)
                sys.stdout.flush()
            return
        if self._was_reasoning and not piece.is_reasoning:
            self._console.print()
        self._was_reasoning = piece.is_reasoning
        self._console.print(self._styled(piece), end="")
        self._console.file.flush()

    def note(self, text: str) -> None:
        """A line that is not part of the answer, only at a terminal."""
        if self.is_terminal:
            self._console.print(text, style="dim")

    def end(self) -> None:
        self._console.print()

    def _styled(self, piece: TextPiece) -> Text:
        if piece.is_reasoning:
            return Text(printable(piece.text), "dim italic")
        if not self._colours or not piece.tokens:
            return Text(printable(piece.text))
        if "".join(token for token, _ in piece.tokens) != piece.text:
            lowest = min(logprob for _, logprob in piece.tokens)
            return Text(printable(piece.text), colour_of(lowest))
        text = Text()
        for token, logprob in piece.tokens:
            text.append(printable(token), colour_of(logprob))
        return text


def colour_of(logprob: float) -> str:
    """From red (0) over yellow (a half) to green (1)."""
    probability = min(1.0, math.exp(logprob))
    red, green = min(1.0, 2 - 2 * probability), min(1.0, 2 * probability)
    return f"rgb({int(60 + 180 * red)},{int(60 + 160 * green)},70)"

"""The input text of a custom tool, extracted from the arguments of its function."""

import re

import msgspec

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_BEGIN = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_PIECE = re.compile(rf'[^"\\]+|{_HIGH}{_LOW}|\\u[0-9a-fA-F]{{4}}|\\["\\/bfnrt]|\\')
_CUT_LOW = r"\\(u([dD]([c-fC-F][0-9a-fA-F]?)?)?)?"
_MAY_GO_ON = re.compile(rf"\\(u[0-9a-fA-F]{{0,3}})?|{_HIGH}({_CUT_LOW})?")
"""An escape that may become another one with more text."""


class CustomInput:
    r"""Gives the text piece by piece as it comes. A model without constraints may write invalid
    JSON: an unknown escape is literal text, as in ``grep \d``, and so are arguments of another
    shape."""

    def __init__(self) -> None:
        self._held = ""
        self._state = self._read_begin

    def push(self, text: str) -> str:
        """The next part of the JSON."""
        self._held += text
        pieces: list[str] = []
        while piece := self._state():
            pieces.append(piece)
        return "".join(pieces)

    def finish(self) -> str:
        """Returns the text held while its continuation was open."""
        if self._state == self._read_text:
            return self._taken(is_last=True)
        left, self._held = self._held, ""
        return left

    def _read_begin(self) -> str:
        if found := _BEGIN.match(self._held):
            self._held = self._held[found.end() :]
            self._state = self._read_text
            return self._read_text()
        if _MAY_BEGIN.fullmatch(self._held) is None:
            self._state = self._read_all
            return self._read_all()
        return ""

    def _read_text(self) -> str:
        return self._taken(is_last=False)

    def _taken(self, is_last: bool) -> str:
        """Characters up to the end of the string, or to an incomplete escape."""
        held, end = self._held, 0
        pieces: list[str] = []
        while end < len(held) and (is_last or not _MAY_GO_ON.fullmatch(held, end)):
            found = _PIECE.match(held, end)
            if found is None:  # a quote
                self._held, self._state = "", self._read_nothing
                return "".join(pieces)
            pieces.append(_decoded(found.group()))
            end = found.end()
        self._held = held[end:]
        return "".join(pieces)

    def _read_all(self) -> str:
        text, self._held = self._held, ""
        return text

    def _read_nothing(self) -> str:
        self._held = ""
        return ""


def _decoded(piece: str) -> str:
    if piece == "\\" or not piece.startswith("\\"):
        return piece
    try:
        return msgspec.json.decode(f'"{piece}"', type=str)
    except msgspec.DecodeError:  # half of a character
        return "\N{REPLACEMENT CHARACTER}"

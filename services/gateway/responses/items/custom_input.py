"""The text that is the input of a custom tool, out of the arguments of the function for it."""

import re

import msgspec

_BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_MAY_BEGIN = re.compile(r'\s*(\{\s*("(i(n(p(u(t("\s*(:\s*)?)?)?)?)?)?)?)?)?')
_PLAIN = re.compile(r'[^"\\]*')
_ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|[^u])")
_LONGEST_ESCAPE = 12


class CustomInput:
    """Gives the text piece by piece as it comes. Arguments of another shape, which a model may
    write that is held to nothing, are the text themselves."""

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
        """What is left of arguments that are no such object."""
        left, self._held = self._held, ""
        return left if self._state == self._read_begin else ""

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
        """Characters up to an escape that is not whole, or to the end of the string."""
        found = _PLAIN.match(self._held)
        assert found is not None
        if plain := found.group():
            self._held = self._held[found.end() :]
            return plain
        if self._held.startswith('"'):
            self._held, self._state = "", self._read_nothing
        is_cut = _may_be_cut(self._held)
        if not is_cut and (escape := _ESCAPE.match(self._held)):
            self._held = self._held[escape.end() :]
            return _decoded(escape.group())
        return ""

    def _read_all(self) -> str:
        text, self._held = self._held, ""
        return text

    def _read_nothing(self) -> str:
        self._held = ""
        return ""


def _may_be_cut(text: str) -> bool:
    """Whether an escape at its beginning may become another with more text."""
    high = re.match(r"\\u[dD][89abAB][0-9a-fA-F]{2}", text)
    return high is not None and len(text) < _LONGEST_ESCAPE and (r"\u".startswith(text[6:8]))


def _decoded(escape: str) -> str:
    try:
        return msgspec.json.decode(f'"{escape}"', type=str)
    except msgspec.DecodeError:  # half of a character
        return "\N{REPLACEMENT CHARACTER}"

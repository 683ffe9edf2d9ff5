"""A parser's text, possibly incomplete.

A parser is a generator: when it needs more text, it yields. Its parts wait for one another by
``yield from``, so each reads as if all of the text were there.
"""

import re
from collections import deque
from collections.abc import Container, Generator, Iterable
from typing import TypeVar

import msgspec

T = TypeVar("T")
Waiting = Generator[None, None, T]
BLANKS = " \t\r\n"
_BLANK_CHARS = frozenset(BLANKS)
_BLANKS = re.compile(f"[{BLANKS}]+")
_FIRST_PART = 0xD800
_ADDED = re.compile(r"[<\[].*[>\]]", re.DOTALL)


class Broken(Exception):
    """The next text does not follow the format."""


class Token(msgspec.Struct, frozen=True, gc=False):
    """An added token; ``shown`` is its part of the client's text."""

    text: str
    shown: str
    index: int


class Parts:
    """Added tokens that are parts of markers: each is one character of the text, a lone surrogate,
    which no model writes."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self.chars = {token: chr(_FIRST_PART + index) for index, token in enumerate(tokens)}

    def spell(self, marker: str) -> str:
        """``marker`` as it stands in the text."""
        for token, char in self.chars.items():
            marker = marker.replace(token, char)
        return marker


NO_PARTS = Parts(())


class Markers:
    """Texts to look for, ``added_tokens`` as tokens and the others as text, spelled with ``parts``.

    A vocabulary may have any word as a token; only a text in brackets counts as an added token.
    """

    def __init__(
        self, texts: Iterable[str], added_tokens: Container[str], parts: Parts = NO_PARTS
    ) -> None:
        self.all = {text for text in texts if text}
        self.tokens = {text for text in self.all if text in added_tokens and _ADDED.fullmatch(text)}
        self.spelled = {parts.spell(text): text for text in self.all - self.tokens}
        self.texts = sorted(self.spelled, key=len, reverse=True)
        self.pattern = re.compile("|".join(map(re.escape, self.texts))) if self.texts else None
        self.beginnings = {text[:num] for text in self.texts for num in range(1, len(text))}
        self.max_held = max(map(len, self.texts), default=1) - 1


class MarkerTable:
    """Markers of one vocabulary, made once for each set of texts; ``tokens`` of it are parts of
    markers."""

    def __init__(self, added_tokens: Container[str], tokens: Iterable[str] = ()) -> None:
        self._added_tokens = added_tokens
        self.parts = Parts(token for token in tokens if token in added_tokens)
        self._made: dict[tuple[str, ...], Markers] = {}

    def of(self, *texts: str) -> Markers:
        if texts not in self._made:
            self._made[texts] = Markers(texts, self._added_tokens, self.parts)
        return self._made[texts]


class TextSource:
    """Text and added tokens in their order.

    A recorded part can be read again unchanged. ``index`` is the position of the last marker among
    the tokens of the output, None if it was text. ``num_chars`` were read.
    """

    def __init__(self) -> None:
        self._items: deque[str | Token] = deque()
        self._text = ""
        self._position = 0
        self._is_ended = False
        self._recorded: list[str] | None = None
        self._last_shown = ""
        self._shown: dict[int, str] = {}  # texts of parts, by character
        self.token: Token | None = None
        self.index: int | None = None
        self.num_chars = 0

    def put(self, item: str | Token) -> None:
        """Adds text; a token is never a part of the text around it."""
        if isinstance(item, Token):
            self._items.append(item)
        elif self._items and isinstance(self._items[-1], str):
            self._items[-1] += item
        elif self._items or self.token is not None:
            self._items.append(item)
        else:
            self._text, self._position = self._text[self._position :] + item, 0

    def put_part(self, char: str, shown: str) -> None:
        """Adds a token that may be part of a marker; ``shown`` is its part of the client's text."""
        self._shown[ord(char)] = shown
        self.put(char)

    def end(self) -> None:
        self._is_ended = True

    def record(self, with_marker: bool = False) -> None:
        """Records from here on, or from the last marker read."""
        self._recorded = [self._last_shown] if with_marker else []

    def recorded(self) -> str:
        """The text read since ``record``; the recording ends."""
        text, self._recorded = "".join(self._recorded or ()), None
        return text

    @property
    def _may_grow(self) -> bool:
        return not self._items and not self._is_ended

    def ready(self) -> Waiting[bool]:
        """Waits for a token or a character; False: there is no more."""
        while self.token is None and self._position == len(self._text):
            if self._items:
                item = self._items.popleft()
                if isinstance(item, str):
                    self._text, self._position = item, 0
                else:
                    self.token = item
            elif self._is_ended:
                return False
            else:
                yield
        return True

    def take(self, num_chars: int) -> str:
        text = self._text[self._position : self._position + num_chars]
        self._position += num_chars
        if self._shown:
            text = text.translate(self._shown)
        self.num_chars += len(text)
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def take_token(self) -> Token:
        token, self.token = self.token, None
        assert token is not None
        self.index, self._last_shown = token.index, token.shown
        self.num_chars += len(token.shown)
        if self._recorded is not None:
            self._recorded.append(token.shown)
        return token

    def take_match(self, pattern: re.Pattern[str]) -> str:
        """The text that ``pattern`` matches at this place, as far as it has come; empty: no
        match."""
        if self.token is not None:
            return ""
        found = scan(pattern, self._text, self._position)
        return self.take(found - self._position)

    def next_char(self) -> Waiting[str]:
        """The next character, left in place; empty: a token comes next, or nothing."""
        is_there = yield from self.ready()
        return self._text[self._position] if is_there and self.token is None else ""

    def is_before(self, char: str, pattern: re.Pattern[str]) -> Waiting[bool]:
        """True: text that ``pattern`` matches as a whole stands between this place and ``char``."""
        num_read = 0
        while self.token is None:
            found = scan(pattern, self._text, self._position + num_read)
            following = self._text[found : found + 1]
            if following not in ("", "\\") or not self._may_grow:
                return following == char
            num_read = found - self._position
            yield
        return False

    def skip_blanks(self) -> Waiting[str]:
        blanks = []
        while (yield from self.next_char()) in _BLANK_CHARS:
            blanks.append(self.take_match(_BLANKS))
        return "".join(blanks)

    def at(self, markers: Markers) -> Waiting[str | None]:
        """The next marker, left in place, if one comes next."""
        while (yield from self.ready()):
            if self.token is not None:
                return self.token.text if self.token.text in markers.tokens else None
            if markers.pattern is None:
                return None
            found = markers.pattern.match(self._text, self._position)
            if found:
                return markers.spelled[found.group()]
            num_left = len(self._text) - self._position
            is_cut = num_left <= markers.max_held and self._may_grow
            if not is_cut or self._text[self._position :] not in markers.beginnings:
                return None
            yield
        return None

    def try_take(self, markers: Markers) -> Waiting[str | None]:
        """Takes the marker that comes next, if one does."""
        marker = yield from self.at(markers)
        if marker is not None and self.token is not None:
            self.take_token()
        elif marker is not None and markers.pattern is not None:
            found = markers.pattern.match(self._text, self._position)
            assert found is not None
            self._last_shown, self.index = self.take(len(found.group())), None
        return marker

    def until(self, markers: Markers) -> Waiting[str]:
        """Text before the next marker, as much as is certain; empty: a marker comes next, or the
        text has ended."""
        while (yield from self.ready()):
            if self.token is not None:
                if self.token.text in markers.tokens:
                    return ""
                if shown := self.take_token().shown:
                    return shown
                continue
            num_chars, is_certain = self._find(markers)
            if text := self.take(num_chars):
                return text
            if is_certain and not num_chars:
                return ""
            if not num_chars:
                yield
        return ""

    def read(self, markers: Markers) -> Waiting[tuple[str, str | None]]:
        """Either the text before the next marker, as much as is certain, or that marker; neither:
        the text has ended."""
        text = yield from self.until(markers)
        if text:
            return text, None
        return "", (yield from self.try_take(markers))

    def _find(self, markers: Markers) -> tuple[int, bool]:
        """The number of characters before the next marker or the possible beginning of one; False:
        it is only a possible beginning."""
        num_left = len(self._text) - self._position
        if markers.pattern is None:
            return num_left, True
        found = markers.pattern.search(self._text, self._position)
        if found:
            return found.start() - self._position, True
        if self._may_grow:
            for num_held in range(min(markers.max_held, num_left), 0, -1):
                if self._text[len(self._text) - num_held :] in markers.beginnings:
                    return num_left - num_held, False
        return num_left, True


def scan(pattern: re.Pattern[str], text: str, start: int) -> int:
    """The end of the match of ``pattern`` at ``start``."""
    found = pattern.match(text, start)
    return found.end() if found else start

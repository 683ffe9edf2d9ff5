"""Writes grammars in the Lark of llguidance."""

import re
from collections.abc import Callable, Collection, Mapping
from itertools import takewhile
from typing import Any

import msgspec

from services.tokenizer.guides.limits import check_limit
from shared.wire.messages import MAX_GRAMMAR_CHARS

ANY_TEXT = r"/(.|\n)*/"
BLANKS = r"/[ \n]{1,4}/"  # Qwen's models write two newlines, one token, before their answer

_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)
_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}]")


def literal(text: str) -> str:
    """These characters; the empty text is nothing."""
    return msgspec.json.encode(text).decode()


def regex(expression: str) -> str:
    """``expression`` between slashes."""

    def written(match: re.Match[str]) -> str:
        return {"/": r"\/", "\n": r"\n"}.get(match[0], match[0])

    return f"/{_TO_ESCAPE.sub(written, expression)}/" if expression else '""'


def escaped(text: str) -> str:
    """An expression for exactly ``text``."""
    return _SPECIAL.sub(r"\\\g<0>", text)


class AddedTokens:
    """The added tokens of a vocabulary, ``ids`` by text: a model writes such a text as one token,
    and never as a part of free text."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        texts = [text for text in ids if text]
        self._pattern = re.compile(_any_of(texts) if texts else r"(?!)")

    def split(self, text: str) -> list[str]:
        """``text`` in parts, each an added token or without any; the longest are found."""
        parts, end = [], 0
        for match in self._pattern.finditer(text):
            parts += [text[end : match.start()], match[0]]
            end = match.end()
        return [part for part in (*parts, text[end:]) if part]


def _common(texts: Collection[str]) -> str:
    """The common beginning of all texts."""
    pairs = zip(min(texts), max(texts), strict=False)
    return "".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _any_of(texts: list[str]) -> str:
    """An expression for the longest of ``texts``, with their common beginning written once: some
    vocabularies have thousands of texts."""
    prefix = _common(texts)
    rests: dict[str, list[str]] = {}
    for text in texts:
        if len(text) > len(prefix):
            rests.setdefault(text[len(prefix)], []).append(text[len(prefix) :])
    if not rests:
        return re.escape(prefix)
    others = "|".join(_any_of(each) for each in rests.values())
    return f"{re.escape(prefix)}(?:{others}){'?' if prefix in texts else ''}"


class Lark:
    """A grammar in the making: rules under names of their own, and grammars that they refer to.

    All that adds to it raises InvalidRequest, naming ``param``, when it is too long for a message.
    """

    def __init__(self, added: AddedTokens, param: str) -> None:
        self.added = added
        self.param = param
        self._num_chars = 0
        self._lines: list[str] = []
        self._names: dict[str, str] = {}
        self._grammars: list[dict[str, str]] = []

    def rule(self, body: str, options: str = "") -> str:
        """The name of a rule; equal ones are one."""
        return self._named("r", f"{options}: {body}")

    def terminal(self, body: str) -> str:
        """The name of a terminal: its text is matched as a whole, as far as possible."""
        return self._named("T", f": {body}")

    def recursive(self, body: Callable[[str], str]) -> str:
        """The name of a rule whose ``body`` is made with its name."""
        name = f"r{len(self._names)}"
        self._names[name] = name
        self._add(f"{name}: {body(name)}")
        return name

    def _named(self, letter: str, text: str) -> str:
        if text not in self._names:
            self._names[text] = f"{letter}{len(self._names)}"
            self._add(self._names[text] + text)
        return self._names[text]

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._num_chars += len(line)
        self._check_size(self._num_chars)

    def _check_size(self, num_chars: int) -> None:
        check_limit(self.param, "characters of the grammar", num_chars, MAX_GRAMMAR_CHARS)

    def json(self, schema: dict[str, Any]) -> str:
        """The name of the rule for JSON of this schema."""
        return self.rule(f"%json {msgspec.json.encode(schema).decode()}")

    def fixed(self, text: str) -> str:
        """This text: added tokens for their names, characters between them."""
        return " ".join(self._token(each) or literal(each) for each in self.added.split(text))

    def after_texts(self, rests: Mapping[str, str]) -> str:
        """One of the texts, and the expression for its rest. Common beginnings are written once: a
        row of llguidance's parser has a few hundred items."""
        prefix = _common(rests)
        groups: dict[str, dict[str, str]] = {}
        for text, rest in rests.items():
            if len(text) > len(prefix):
                groups.setdefault(text[len(prefix)], {})[text[len(prefix) :]] = rest
        words = [self.after_texts(group) for group in groups.values()]
        if prefix in rests:
            words.append(rests[prefix] or '""')
        return f"{literal(prefix)} {self.rule(' | '.join(words))}"

    def lazy(self, text: str, padding: str = "") -> str:
        """Any text up to the first ``text``, which is part of it and has ``padding`` before it; if
        there is an added token in ``text``, up to the first of these."""
        parts = self.added.split(text)
        for index, part in enumerate(parts):
            if token := self._token(part):
                before = padding + "".join(parts[:index])
                head = self._ending_in(before) if before else self.any_text()
                head = self.rule(f"{head} {token}")
                return " ".join([head, *map(self.fixed, parts[index + 1 :])])
        if not padding:
            return self.rule(regex(f"(.|\\n)*{escaped(text)}"), "[lazy]")
        longer = regex(f"(.|\\n)*{escaped(text)}(.|\\n)+")
        padded = regex(f"(.|\\n)*{escaped(padding + text)}")
        return self.terminal(f"{padded} & ~{longer}")

    def _ending_in(self, text: str) -> str:
        return self.terminal(regex(f"(.|\\n)*{escaped(text)}"))

    def any_text(self) -> str:
        return self.terminal(ANY_TEXT)

    def blanks(self) -> str:
        """Up to four blanks, or none."""
        return f"{self.terminal(BLANKS)}?"

    def grammar(self, text: str) -> str:
        """A reference to a whole grammar in Lark with its own namespace."""
        name = f"g{len(self._grammars)}"
        self._grammars.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _token(self, text: str) -> str | None:
        return f"<[{self.added.ids[text]}]>" if text in self.added.ids else None

    def written(self, start: str) -> str:
        """The whole grammar with the start expression ``start``, for llguidance's matcher."""
        main = "\n".join([f"start: {start}", *self._lines, ""])
        text = msgspec.json.encode({"grammars": [{"lark_grammar": main}, *self._grammars]}).decode()
        self._check_size(len(text))
        return text

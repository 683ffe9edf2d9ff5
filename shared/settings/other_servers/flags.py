"""Flags in the forms of other servers, turned into ours."""

import json
import logging
import re
from collections.abc import Iterator, Set
from typing import Any

from shared.settings.names_elsewhere import LISTS, TRUTHS, VALUE, Known, NamesElsewhere

log = logging.getLogger(__name__)

OPTIMIZATION = re.compile(r"-O\d?")


def our_flags(arguments: list[str], known: Set[str], names: NamesElsewhere) -> list[str]:
    """``arguments`` with our names for settings. Other words are kept."""
    return list(_Flags(arguments, known, names).read())


def name_of(flag: str, names: NamesElsewhere) -> str:
    """The name in ``flag``, which may be a short one, empty for any other word."""
    if flag.startswith("--"):
        return flag[2:].replace("-", "_")
    if OPTIMIZATION.fullmatch(flag):
        return "optimization_level"
    head, dot, key = flag.partition(".")
    return names.short[head] + dot + key if head in names.short else ""


class _Flags:
    def __init__(self, arguments: list[str], known: Set[str], names: NamesElsewhere) -> None:
        self._words = arguments[::-1]  # reversed, so that pop returns the next
        self._known = known
        self._names = names
        self._objects: dict[str, dict[str, Any]] = {}

    def read(self) -> Iterator[str]:
        while self._words:
            word = self._words.pop()
            flag, is_joined, value = word.partition("=")
            name, _, key = name_of(flag, self._names).partition(".")
            if is_joined and name:
                self._words.append(value)
            if name in self._known:
                yield from self._ours(name, key, bool(is_joined))
            elif name.removeprefix("no_") in self._known:
                yield _flag(name)
            elif name and (found := self._names.find_harmless(flag, name)):
                yield from self._foreign(flag, found)
            else:
                yield word
                if is_joined and name:
                    self._words.pop()
        for name, keys in self._objects.items():
            yield from (_flag(name), json.dumps(keys))

    def _ours(self, name: str, key: str, is_joined: bool) -> Iterator[str]:
        if key:
            _put(self._objects.setdefault(name, {}), key.split("."), self._value())
        elif name in LISTS and len(values := [*self._values()]) > 1:
            yield from (_flag(name), ",".join(values))
        elif name in LISTS:
            yield from (_flag(name), *values)
        elif is_joined:
            yield f"{_flag(name)}={self._words.pop()}"
        else:
            yield _flag(name)

    def _foreign(self, flag: str, found: Known) -> Iterator[str]:
        values = [*self._values()] if found.takes_value else [*self._truth()]
        value = ",".join(values) or found.value
        if found.name:
            log.warning("%s is %s %s here", flag, _flag(found.name), value)
            yield from _set(found.name, value)
        else:
            log.warning("%s has no effect: %s", flag, found.reason)

    def _value(self) -> str:
        return self._words.pop() if self._words and VALUE.fullmatch(self._words[-1]) else "true"

    def _values(self) -> Iterator[str]:
        while self._words and VALUE.fullmatch(self._words[-1]):
            yield self._words.pop()

    def _truth(self) -> Iterator[str]:
        if self._words and self._words[-1].lower() in TRUTHS:
            yield self._words.pop()


def _put(target: dict[str, Any], keys: list[str], text: str) -> None:
    for key in keys[:-1]:
        target = target.setdefault(key, {})
    try:
        target[keys[-1]] = json.loads(text)
    except json.JSONDecodeError:
        target[keys[-1]] = text


def _set(name: str, value: str) -> Iterator[str]:
    """The words for one of our settings; a boolean takes no value."""
    if value in TRUTHS:
        yield _flag(name if value == "true" else f"no_{name}")
    else:
        yield from (_flag(name), value)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

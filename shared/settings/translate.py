"""Reads the settings of vLLM, SGLang and FastDeploy: the same rule for flags, variables and files.

Our settings are used. A foreign one (``other_servers``) is taken under our name, or is ignored
with its reason in one line of the log. Any other name is an error.
"""

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Set
from typing import Any

from shared.errors import ConfigError
from shared.settings.environment import PREFIX, unread_variables
from shared.settings.known import NAMES
from shared.settings.names_elsewhere import Known

log = logging.getLogger(__name__)

LISTS = (
    "allowed_hosts",
    "allowed_origins",
    "api_key",
    "cudagraph_capture_sizes",
    "lora_modules",
    "served_model_name",
)
"""Settings whose values vLLM and SGLang take as separate words."""
OPTIMIZATION = re.compile(r"-O\d?")
VALUE = re.compile(r"[^-].*|-\d.*|", re.DOTALL)
TRUTHS = ("true", "false")


def our_flags(arguments: list[str], known: Set[str]) -> list[str]:
    """``arguments`` with our names for settings. Other words are kept."""
    return list(_Flags(arguments, known).read())


class _Flags:
    def __init__(self, arguments: list[str], known: Set[str]) -> None:
        self._words = arguments[::-1]  # reversed, so that pop returns the next
        self._known = known
        self._objects: dict[str, dict[str, Any]] = {}

    def read(self) -> Iterator[str]:
        while self._words:
            word = self._words.pop()
            flag, is_joined, value = word.partition("=")
            name, _, key = name_of(flag).partition(".")
            if is_joined and name:
                self._words.append(value)
            if name in self._known:
                yield from self._ours(name, key, bool(is_joined))
            elif name.removeprefix("no_") in self._known:
                yield f"--{name.replace('_', '-')}"
            elif name and (found := _find(flag, name)):
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


def our_settings(path: object, settings: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """The ``settings`` of a file under our names. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = name.replace("_", "-")
        if name in known:
            found[name] = value
        elif (positive := name.removeprefix("no_")) in known:
            found[positive] = not value
        elif foreign := _find(key, name):
            found |= _translated(f"{path}: {key}", foreign, value)
        else:
            raise ConfigError(f"{path}: {key} is not a setting{_hint(name, known)}")
    return found


def our_variables(known: Set[str]) -> dict[str, str]:
    """Settings in the environment under foreign names. Raises ConfigError."""
    found: dict[str, str] = {}
    for name, advice in NAMES.protecting_variables.items():
        if name in os.environ:
            raise ConfigError(f"{name} has no effect here: {advice}")
    for name in sorted(NAMES.variables.keys() & os.environ.keys()):
        log.warning("%s has no effect: %s", name, NAMES.variables[name])
    for name in unread_variables(known):
        key = name[len(PREFIX) :].lower()
        foreign = _find(name, key)
        if foreign is None:
            raise ConfigError(f"{name} is not a setting{_hint(key, known, PREFIX)}")
        found |= _translated(name, foreign, os.environ[name])
    return found


def nearest(word: str, known: Set[str]) -> str | None:
    """The shortest name that begins with ``word``, else the most similar one."""
    word = word.lower().replace("-", "_")
    if word and (longer := [key for key in known if key.startswith(word)]):
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.7)), None)


def _translated(where: str, found: Known, value: Any) -> dict[str, Any]:
    """A setting under our name; empty for a switch that is off."""
    if not found.name:
        log.warning("%s has no effect: %s", where, found.reason)
        return {}
    if not found.takes_value:
        if str(value).lower() != "true":
            return {}
        value = found.value
    log.warning("%s is %s here", where, found.name.replace("_", "-"))
    return {found.name: value}


def _find(given: str, name: str) -> Known | None:
    """Raises ConfigError for a setting whose absence would leave a server open."""
    if name in NAMES.protecting:
        raise ConfigError(f"{given}: {NAMES.protecting[name]}")
    return NAMES.find(name)


def name_of(flag: str) -> str:
    """The name in ``flag``, empty for any other word."""
    if flag.startswith("--"):
        return flag[2:].replace("-", "_")
    if OPTIMIZATION.fullmatch(flag):
        return "optimization_level"
    head, dot, key = flag.partition(".")
    return NAMES.short[head] + dot + key if head in NAMES.short else ""


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _hint(name: str, known: Set[str], prefix: str = "") -> str:
    near = nearest(name, known)
    if near is None:
        return ""
    return f"; did you mean {prefix}{near.upper() if prefix else near.replace('_', '-')}?"

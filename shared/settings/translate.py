"""Settings under the names of vLLM, SGLang and FastDeploy in variables and files.

Our settings are used. A foreign one (``other_servers``) is taken under our name, or is ignored
with its reason in one line of the log. Any other name is an error.
"""

import difflib
import logging
import os
from collections.abc import Mapping, Set
from typing import Any

from shared.errors import ConfigError
from shared.settings.environment import PREFIX, unread_variables
from shared.settings.known import NAMES
from shared.settings.names_elsewhere import Known

log = logging.getLogger(__name__)


def our_settings(path: object, settings: Mapping[str, Any], known: Set[str]) -> dict[str, Any]:
    """The ``settings`` of a file under our names. Raises ConfigError."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        key = name.replace("_", "-")
        if name in known:
            is_switch = isinstance(value, bool)  # pydantic reads true as the number 1 too
            found[name] = str(value).lower() if is_switch else value
        elif (positive := name.removeprefix("no_")) in known:
            found[positive] = str(not value).lower()
        elif foreign := NAMES.find_harmless(key, name):
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
        foreign = NAMES.find_harmless(name, key)
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


def _hint(name: str, known: Set[str], prefix: str = "") -> str:
    near = nearest(name, known)
    if near is None:
        return ""
    return f"; did you mean {prefix}{near.upper() if prefix else near.replace('_', '-')}?"

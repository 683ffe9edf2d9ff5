"""Where settings come from, and the texts of errors in them."""

import difflib
import logging
import os
from collections.abc import Set
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    YamlConfigSettingsSource,
)

from shared.errors import ConfigError

log = logging.getLogger(__name__)

# Settings that protect other servers and are not supported yet: to ignore them would be a trap.
PROTECTING_KEYS = {"ssl_ca_certs"}

PREFIX = "SHOAL_"
UNRECOGNIZED = "unrecognized arguments: "  # argparse's words
# A variable that `shoal serve` sets for its services and that is no setting.
SUPERVISOR_FD = f"{PREFIX}SUPERVISOR_FD"
# Variables of the stack files, whose containers get all that stands in .env.
STACK_VARIABLES = {
    f"{PREFIX}{name}" for name in ("API_KEYS", "CERTIFICATE", "ENV", "MODEL_NAME", "PUBLISH", "TAG")
}

# Settings whose values no error quotes.
SECRET_SETTINGS = {"api_key", "admin_token", "reasoning_key"}


class YamlSource(YamlConfigSettingsSource):
    """Reads ``max-model-len`` and ``max_model_len`` alike and warns of keys not ``known``."""

    def __init__(self, settings_cls: type[BaseSettings], path: str, known: Set[str]) -> None:
        self._known = known
        super().__init__(settings_cls, yaml_file=path)

    def _read_file(self, file_path: Path | Traversable) -> dict[str, Any]:
        try:
            content = super()._read_file(file_path)
        except yaml.YAMLError as error:
            raise ConfigError(f"config: {file_path} is no YAML{_where(error)}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"config: {file_path} must hold a mapping of settings")
        settings = {str(key).replace("-", "_"): value for key, value in content.items()}
        for key in sorted(settings.keys() & PROTECTING_KEYS):
            raise ConfigError(
                f"{key.replace('_', '-')}: not supported yet; remove it to serve without"
            )
        for key in sorted(settings.keys() - self._known):
            name, near = key.replace("_", "-"), _nearest(key, self._known)
            hint = f"; did you mean {near.replace('_', '-')}?" if near else ""
            log.warning("%s: %s is not supported and has no effect%s", file_path, name, hint)
        return settings


def merging(cls: type[BaseSettings], flags: CliSettingsSource[Any], known: Set[str]) -> type[Any]:
    """Returns ``cls`` with its sources in the order flags, environment, file.

    A flag or the environment names the file; ``known`` are the keys that any service reads.
    """
    path = flags().get("config") or os.environ.get("SHOAL_CONFIG")
    if path and not Path(path).is_file():
        raise ConfigError(f"config: no such file: {path}")

    class Merged(cls):  # type: ignore[valid-type,misc]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = (YamlSource(settings_cls, path, known),) if path else ()
            return (flags, env_settings, *file)

    Merged.__name__ = cls.__name__
    return Merged


def unread_variables(known: Set[str]) -> list[str]:
    """Returns the names in the environment that begin with ``SHOAL_`` and that no service reads."""
    names = sorted(name for name in os.environ if name.upper().startswith(PREFIX))
    settings = {f"{PREFIX}{name}".upper() for name in known}
    read = settings | STACK_VARIABLES | {SUPERVISOR_FD}
    return [name for name in names if name.upper() not in read]


def warn_of_unread_variables(known: Set[str]) -> None:
    for name in unread_variables(known):
        near = _nearest(name[len(PREFIX) :], known)
        hint = f"; did you mean {PREFIX}{near.upper()}?" if near else ""
        log.warning("%s is no setting and has no effect%s", name, hint)


def advised(error: str, known: Set[str], prog: str) -> str:
    """Adds advice to an error of the settings' parser. A word that is no flag was most likely meant
    as the model."""
    text = error.removeprefix("error parsing CLI: ")
    if text == error:
        return text
    words = _unknown(text)
    if words and not words[0].startswith("-") and "model" in known:
        return f"{text}; did you mean --model {words[0]}? See {prog} --help"
    return with_near_flags(text, known, prog)


def with_near_flags(text: str, known: Set[str], prog: str) -> str:
    """Adds to an error of a parser of flags those that are most like the unknown ones."""
    wrong = [word.partition("=")[0][2:] for word in _unknown(text) if word.startswith("--")]
    found = [key for word in wrong if (key := _nearest(word, known))]
    near = [f"--{key.replace('_', '-')}" for key in found]
    hint = f"; did you mean {', '.join(near)}?" if near else "."
    return f"{text}{hint} See {prog} --help"


def _unknown(text: str) -> list[str]:
    words = text.removeprefix(UNRECOGNIZED)
    return [] if words == text else words.split()


def _nearest(word: str, known: Set[str]) -> str | None:
    """The shortest that begins with ``word``, else the one that is most like it."""
    word = word.lower().replace("-", "_")
    if word and (longer := [key for key in known if key.startswith(word)]):
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(word, known, n=1, cutoff=0.7)), None)


def _where(error: yaml.YAMLError) -> str:
    """Returns only the position, since the text of ``error`` may quote a key."""
    mark = getattr(error, "problem_mark", None)
    return f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def one_line(detail: Any) -> str:
    text = detail["msg"].removeprefix("Value error, ")
    name = ".".join(part for part in detail["loc"] if isinstance(part, str)).replace("_", "-")
    if SECRET_SETTINGS & set(detail["loc"]):
        return f"{name}: {text}"
    # An error of several settings together has no place; its text names them.
    return f"{name}: {detail['input']!r}: {text}" if name else text

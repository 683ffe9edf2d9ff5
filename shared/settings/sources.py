"""Sources of settings, and the texts of their errors."""

import os
from collections.abc import Set
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import yaml
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    YamlConfigSettingsSource,
)

from shared.errors import ConfigError
from shared.settings.environment import PREFIX
from shared.settings.json_object import message_of
from shared.settings.translate import nearest, our_settings, our_variables

UNRECOGNIZED = "unrecognized arguments: "  # argparse's words
# Settings with values that no error quotes.
SECRET_SETTINGS = {"api_key", "admin_token", "reasoning_key"}


class YamlSource(YamlConfigSettingsSource):
    """Reads ``max-model-len`` and ``max_model_len`` alike."""

    def __init__(self, settings_cls: type[BaseSettings], path: str, known: Set[str]) -> None:
        self._known = known
        super().__init__(settings_cls, yaml_file=path)

    def _read_file(self, file_path: Path | Traversable) -> dict[str, Any]:
        try:
            content = super()._read_file(file_path)
        except yaml.YAMLError as error:
            raise ConfigError(f"config: {file_path} is not YAML{_where(error)}") from None
        except RecursionError:
            raise ConfigError(f"config: {file_path} is nested too deeply") from None
        except UnicodeDecodeError:  # its text quotes the file
            raise ConfigError(f"config: {file_path} is not UTF-8") from None
        except OSError as error:
            raise ConfigError(f"config: {file_path}: {error.strerror}") from None
        if not isinstance(content, dict):
            raise ConfigError(f"config: {file_path} must hold a mapping of settings")
        settings = {str(key).replace("-", "_"): value for key, value in content.items()}
        return our_settings(file_path, settings, self._known)


def merging(
    cls: type[BaseSettings], first: PydanticBaseSettingsSource, known: Set[str]
) -> type[Any]:
    """``cls`` with its sources in the order ``first`` (flags, for example), environment, file.

    The first source or the environment names the file; ``known`` are the keys of all services.
    """
    path = first().get("config") or os.environ.get("SHOAL_CONFIG")
    if path and not Path(path).is_file():
        raise ConfigError(f"config: no such file: {path}")
    variables = our_variables(known)

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
            return (first, env_settings, InitSettingsSource(settings_cls, variables), *file)

    Merged.__name__ = cls.__name__
    return Merged


def advised(error: str, known: Set[str], prog: str) -> str:
    """Adds advice to an error of the settings' parser. A stray word was most likely meant as the
    model."""
    text = error.removeprefix("error parsing CLI: ")
    if text == error:
        return text
    words = _unknown(text)
    if words and not words[0].startswith("-") and "model" in known:
        return f"{text}; did you mean --model {words[0]}? See {prog} --help"
    return with_near_flags(text, known, prog)


def with_near_flags(text: str, known: Set[str], prog: str) -> str:
    """Adds the most similar flags to an error about unknown ones."""
    wrong = [word.partition("=")[0][2:] for word in _unknown(text) if word.startswith("--")]
    found = [key for word in wrong if (key := nearest(word, known))]
    near = [f"--{key.replace('_', '-')}" for key in found]
    hint = f"; did you mean {', '.join(near)}?" if near else "."
    return f"{text}{hint} See {prog} --help"


def _unknown(text: str) -> list[str]:
    words = text.removeprefix(UNRECOGNIZED)
    return [] if words == text else words.split()


def _where(error: yaml.YAMLError) -> str:
    """The position only, since the text of ``error`` may quote a key."""
    mark = getattr(error, "problem_mark", None)
    return f": line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def one_line(detail: Any) -> str:
    text = message_of(detail)
    name = ".".join(part for part in detail["loc"] if isinstance(part, str)).replace("_", "-")
    if SECRET_SETTINGS & set(detail["loc"]):
        return f"{name}: {text}"
    if detail["loc"] and os.environ.get(variable := f"{PREFIX}{detail['loc'][0]}".upper()):
        name += f" ({variable})" * (os.environ[variable] == detail["input"])
    # An error about several settings has no location; its text names them.
    return f"{name}: {detail['input']!r}: {text}" if name else text

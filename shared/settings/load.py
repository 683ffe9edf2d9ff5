"""Reads the settings of one process: flags override the environment (``SHOAL_…``), which overrides
a YAML file. Keys are the ones of vLLM and FastDeploy if the meaning is the same."""

from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, InitSettingsSource, SettingsError

from shared.errors import ConfigError
from shared.settings.base import Settings
from shared.settings.known import NAMES
from shared.settings.serve import ServeConfig
from shared.settings.sources import advised, merging, one_line
from shared.settings.translate import our_settings

Config = TypeVar("Config", bound=Settings)


def load_settings(
    cls: type[Config], argv: list[str], prog: str, others: Iterable[str] = ()
) -> Config:
    """Merges file, environment and ``argv``; ConfigError has one line per wrong setting.

    ``others`` are further flags of a command, used for suggestions only.
    """
    with _one_line_each({*cls.model_fields, *others}, prog):
        flags: CliSettingsSource[Any] = CliSettingsSource(
            cls, cli_parse_args=NAMES.flags(argv, cls.model_fields.keys()), cli_prog_name=prog
        )
        settings: Config = merging(cls, flags, ServeConfig.model_fields.keys())()
        return settings


def load_given(cls: type[Config], given: Mapping[str, Any], caller: str) -> Config:
    """Merges file, environment and ``given``, Python values by name, of which None is the default.
    Raises ConfigError as ``load_settings``."""
    known = ServeConfig.model_fields.keys()
    values = {name: value for name, value in given.items() if value is not None}
    with _one_line_each(known, caller):
        source = InitSettingsSource(cls, our_settings(caller, values, known))
        settings: Config = merging(cls, source, known)()
        return settings


@contextmanager
def _one_line_each(known: Set[str], prog: str) -> Iterator[None]:
    """Turns errors of the parser and of the checks into ConfigError."""
    try:
        yield
    except ValidationError as error:
        raise ConfigError("\n".join(one_line(detail) for detail in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(advised(str(error), known, prog)) from None

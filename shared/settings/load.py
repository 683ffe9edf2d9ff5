"""Reads the settings of one process: flags override the environment (``SHOAL_…``), which overrides
a YAML file. Keys are the ones of vLLM and FastDeploy if the meaning is the same."""

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_settings import CliSettingsSource, SettingsError

from shared.errors import ConfigError
from shared.settings.base import Settings
from shared.settings.help import print_help, wanted_help
from shared.settings.serve import ServeConfig
from shared.settings.sources import advised, merging, one_line
from shared.settings.translate import our_flags

Config = TypeVar("Config", bound=Settings)


def load_settings(
    cls: type[Config], argv: list[str], prog: str, others: Iterable[str] = ()
) -> Config:
    """Merges file, environment and ``argv``; ConfigError has one line per wrong setting.

    ``others`` are further flags of a command, used for suggestions only. Prints the help and exits
    if ``argv`` asks for it.
    """
    if (word := wanted_help(argv)) is not None:
        print_help(cls, prog, word)
        sys.exit(0)
    known = ServeConfig.model_fields.keys()
    try:
        flags: CliSettingsSource[Any] = CliSettingsSource(
            cls, cli_parse_args=our_flags(argv, cls.model_fields.keys()), cli_prog_name=prog
        )
        settings: Config = merging(cls, flags, known)()
        return settings
    except ValidationError as error:
        raise ConfigError("\n".join(one_line(detail) for detail in error.errors())) from None
    except SettingsError as error:
        raise ConfigError(advised(str(error), {*cls.model_fields, *others}, prog)) from None

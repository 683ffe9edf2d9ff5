"""Settings as another process finds them in its environment."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import SecretStr

from shared.settings.base import Settings
from shared.settings.sources import PREFIX


def with_settings(
    environment: Mapping[str, str], config: Settings, names: Iterable[str]
) -> dict[str, str]:
    """Returns ``environment`` with the settings ``names`` of ``config``, and without those that are
    None."""
    found = dict(environment)
    for name in names:
        variable, value = f"{PREFIX}{name.upper()}", getattr(config, name)
        if value is None:
            found.pop(variable, None)
        else:
            found[variable] = _text(value)
    return found


def _text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, list):
        return json.dumps(value, default=SecretStr.get_secret_value)
    return str(value)

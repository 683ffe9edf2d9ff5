"""Settings in the environment of a process."""

import json
import os
import re
from collections.abc import Iterable, Mapping, Set
from typing import Any

from pydantic import SecretStr

from shared.settings.base import Settings

PREFIX = "SHOAL_"
# Set by `shoal serve` for its services, but no setting.
SUPERVISOR_FD = f"{PREFIX}SUPERVISOR_FD"
SERVER_URL = f"{PREFIX}URL"  # of clients' commands
# Variables of the stack files; containers get everything in .env.
STACK_VARIABLES = {
    f"{PREFIX}{name}"
    for name in ("ADAPTERS", "API_KEYS", "CERTIFICATE", "ENV", "MODEL_NAME", "PUBLISH", "TAG")
}
# Kubernetes adds variables for each service of a namespace.
SERVICE_LINK = re.compile(r".*_(SERVICE_HOST|SERVICE_PORT\w*|PORT_\d+_(TCP|UDP)\w*)")


def unread_variables(known: Set[str]) -> list[str]:
    """Names in the environment with ``SHOAL_`` that no service reads."""
    names = sorted(name for name in os.environ if name.upper().startswith(PREFIX))
    settings = {f"{PREFIX}{name}".upper() for name in known}
    read = settings | STACK_VARIABLES | {SUPERVISOR_FD, SERVER_URL}
    return [name for name in names if name.upper() not in read and not SERVICE_LINK.match(name)]


def with_settings(
    environment: Mapping[str, str], config: Settings, names: Iterable[str]
) -> dict[str, str]:
    """``environment`` with the settings ``names`` of ``config``, without None values."""
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
    if isinstance(value, list | dict):
        return json.dumps(value, default=SecretStr.get_secret_value)
    return str(value)

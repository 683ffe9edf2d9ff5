"""Common parts of the commands' flags: parsing and help format."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from shared.errors import ConfigError
from shared.settings.environment import SERVER_URL
from shared.settings.sources import with_near_flags

DEFAULT_URL = "http://127.0.0.1:8000"
HELP_WIDTH = 80


class _Help(argparse.HelpFormatter):
    """As wide as a small terminal, and the same with every version of Python."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=HELP_WIDTH)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = ", ".join(action.option_strings)
        if not names:
            return super()._format_action_invocation(action)
        value = "" if action.nargs == 0 else self._format_args(action, action.dest.upper())
        if action.nargs == argparse.ONE_OR_MORE:
            value = f"{action.metavar} …"
        return f"{names} {value}".rstrip()


class Parser(argparse.ArgumentParser):
    """Raises ConfigError instead of ending the process; only ``--help`` exits."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, formatter_class=_Help, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        text = message.removeprefix("argument ")  # the flag's name follows
        if text == message:
            names = {each.lstrip("-").replace("-", "_") for each in self._option_string_actions}
            text = with_near_flags(message, names, self.prog)
        raise ConfigError(text)


def add_server(add: Callable[..., Any]) -> None:
    """Adds ``--url`` and ``--api-key``."""
    url = os.environ.get(SERVER_URL, DEFAULT_URL)
    add("--url", type=server_url, default=url, help=f"(default: {SERVER_URL}, or {DEFAULT_URL})")
    key = os.environ.get("SHOAL_API_KEY")
    add("--api-key", metavar="KEY", default=key, help="(default: SHOAL_API_KEY)")


def argument_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Makes an argparse type that shows the text of ``parse``'s ValueError."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _bounded(kind: type, name: str, low: float, high: float) -> Callable[[str], Any]:
    def number(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise ValueError(f"'{text}' is not {name} from {low:g} to {high:.10g}")
        return value

    return argument_type(number)


def whole(low: int, high: int) -> Callable[[str], Any]:
    return _bounded(int, "an integer", low, high)


def number(low: float, high: float) -> Callable[[str], Any]:
    return _bounded(float, "a number", low, high)


@argument_type
def result_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{text} is not a path for a file")
    return path


@argument_type
def server_url(text: str) -> str:
    """The URL without a trailing slash and without the /v1 of SDKs."""
    try:
        url = urlsplit(text)
        is_whole = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port above 65535
        is_whole = False
    if not is_whole:
        raise ValueError(f"'{text}' is not a URL such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")

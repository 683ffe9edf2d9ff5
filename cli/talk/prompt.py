"""The prompt of a command: its words, and its standard input."""

import sys
from collections.abc import Sequence

from shared.errors import ConfigError


def is_piped() -> bool:
    return not sys.stdin.isatty()


def read_prompt(words: Sequence[str]) -> str:
    """The words, then standard input unless that is a terminal. A single line end at the end of the
    input is removed."""
    parts = [" ".join(words)] if words else []
    if is_piped() and (text := sys.stdin.read().removesuffix("\n")):
        parts.append(text)
    return "\n\n".join(parts)


def required(text: str, name: str = "PROMPT") -> str:
    """Raises ConfigError for an empty one."""
    if not text:
        raise ConfigError(f"{name}: missing, in the arguments and on standard input")
    return text

"""The prompt of a command: its words, and what is piped into it."""

import sys
from collections.abc import Sequence

from shared.errors import ConfigError


def is_piped() -> bool:
    return not sys.stdin.isatty()


def read_prompt(words: Sequence[str]) -> str:
    """Returns the words, then what comes from standard input unless that is a terminal. A single
    line end at the end of the input is not part of it."""
    parts = [" ".join(words)] if words else []
    if is_piped() and (text := sys.stdin.read().removesuffix("\n")):
        parts.append(text)
    return "\n\n".join(parts)


def required(text: str, name: str = "PROMPT") -> str:
    """Raises ConfigError for an empty one."""
    if not text:
        raise ConfigError(f"{name}: there is none, neither as words nor on standard input")
    return text

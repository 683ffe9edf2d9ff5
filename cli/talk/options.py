"""The flags and the prompt of ``shoal chat`` and ``shoal complete``."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from cli.flags import Parser, add_server, argument_type, number, whole
from shared.errors import ConfigError

MAX_TOKENS = 2**31 - 1
EPILOG = "Exit codes: 0; 1: refused or broken off; 2: wrong flag, no server; 130: Ctrl-C."


def make_parser(name: str, description: str) -> Parser:
    """A parser with the flags common to both."""
    usage = f"shoal {name} [--flag VALUE …] [PROMPT …]"
    parser = Parser(f"shoal {name}", usage=usage, description=description, epilog=EPILOG)
    add = parser.add_argument
    text = "standard input is appended"
    add("prompt", nargs="*", metavar="PROMPT", help=text)
    add_server(add)
    add("--model", help="(default: the first the server lists)")
    add("--max-tokens", type=whole(1, MAX_TOKENS), metavar="N", help="longest answer")
    add("--temperature", type=number(0, 2), metavar="T", help="(default: the server's)")
    add("--top-p", type=number(0, 1), metavar="P", help="(default: the server's)")
    add("--seed", type=whole(0, 2**63 - 1), metavar="N", help="the same seed gives the same output")
    text = "colours tokens by probability: green: certain, red: not"
    add("--probabilities", action="store_true", help=text)
    for name in ("--colours", "--colors"):
        add(name, action="store_true", dest="probabilities", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="prints the server's complete reply at its end")
    return parser


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that were given as flags."""
    names = ("max_tokens", "temperature", "top_p", "seed")
    return {name: value for name in names if (value := getattr(options, name)) is not None}


@argument_type
def not_empty(text: str) -> str:
    if not text:
        raise ValueError("it is empty")
    return text


def is_piped() -> bool:
    return not sys.stdin.isatty()


def read_prompt(words: Sequence[str], name: str = "PROMPT") -> str:
    """The words, then standard input unless that is a terminal. A single line end at the end of the
    input is removed. Raises ConfigError for an empty prompt."""
    parts = [" ".join(words)] if words else []
    try:
        if is_piped() and (text := sys.stdin.read().removesuffix("\n")):
            parts.append(text)
        prompt = "\n\n".join(parts)
        prompt.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise ConfigError(f"{name}: not UTF-8: {error.reason}") from None
    if not prompt:
        raise ConfigError(f"{name}: missing, in the arguments and on standard input")
    return prompt

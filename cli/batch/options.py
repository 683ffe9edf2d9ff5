"""The flags of ``shoal run-batch``; all others are settings of its mesh."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.flags import Parser, argument_type, number, result_file, server_url, whole
from shared.errors import ConfigError
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig
from shared.wire.messages import MAX_PRIORITY

DEFAULT_NUM_AT_ONCE = 128
DEFAULT_MAX_LINE_BYTES = 16 << 20
MAX_S = 1e6


@dataclass(frozen=True)
class Options:
    input_file: Path
    output_file: Path
    url: str | None
    api_key: str | None
    max_concurrent_requests: int
    max_line_bytes: int
    priority: int | None
    retry: float
    timeout: float
    json: Path | None


def parse(arguments: list[str]) -> tuple[Options, list[str]]:
    """The options, and the settings for a mesh. Raises ConfigError; ``--help`` exits."""
    parser = _parser()
    known, settings = parser.parse_known_args(arguments)
    options = Options(**vars(known))
    if options.url is not None and settings:
        load_settings(ServeConfig, settings, parser.prog, vars(options))
        raise ConfigError(
            f"{settings[0]}: settings are for a mesh of its own, and --url names a server"
        )
    if options.url is None and options.api_key is not None:
        raise ConfigError("--api-key: needs --url")
    if not options.input_file.is_file():
        raise ConfigError(f"--input-file: no such file: {options.input_file}")
    if options.output_file.exists() and options.output_file.samefile(options.input_file):
        raise ConfigError("--output-file: is the input file")
    if options.url is not None and options.api_key is None:
        return Options(**vars(known) | {"api_key": os.environ.get("SHOAL_API_KEY")}), []
    return options, settings


def _parser() -> Parser:
    parser = Parser(
        "shoal run-batch",
        usage="shoal run-batch -i FILE -o FILE [--flag VALUE …]",
        description="Answers the requests in a file in the format of OpenAI's batches. The same"
        " command resumes after an interruption.",
        epilog="All settings of `shoal serve` are allowed too, unless --url names a server."
        " Exit codes: 0: all requests answered; 1: some lines have errors; 2: a"
        " wrong setting or file; 3: stopped before the end, can resume; 130: Ctrl-C.",
    )
    add: Callable[..., Any] = parser.add_argument
    text = "JSON lines with custom_id, method, url and body"
    add("-i", "--input-file", type=argument_type(_path), required=True, metavar="FILE", help=text)
    text = "gets one line for each result"
    add("-o", "--output-file", type=argument_type(_place), required=True, metavar="FILE", help=text)
    add("--url", type=server_url, help="a running server (default: starts a mesh)")
    add("--api-key", metavar="KEY", help="for --url (default: SHOAL_API_KEY)")
    text = "most requests open at once (default: %(default)s)"
    sizes = whole(1, 100_000)
    default = DEFAULT_NUM_AT_ONCE
    add("--max-concurrent-requests", type=sizes, default=default, metavar="N", help=text)
    text = "longer lines get an error (default: %(default)s)"
    sizes = whole(1, 1 << 40)
    default = DEFAULT_MAX_LINE_BYTES
    add("--max-line-bytes", type=sizes, default=default, metavar="N", help=text)
    text = "higher is later (default: the server's)"
    add("--priority", type=whole(0, MAX_PRIORITY), metavar="N", help=text)
    text = "seconds of retries after temporary errors (default: %(default)g)"
    add("--retry", type=number(0, MAX_S), default=300.0, metavar="S", help=text)
    text = "timeout of a reply in seconds (default: %(default)g)"
    add("--timeout", type=number(0.001, MAX_S), default=3600.0, metavar="S", help=text)
    add("--json", type=result_file, metavar="FILE", help="file for a summary")
    return parser


def _path(text: str) -> Path:
    if text.startswith(("http://", "https://")):
        raise ValueError(f"'{text}' is a URL; only local paths are read and written")
    return Path(text)


def _place(text: str) -> Path:
    path = _path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"{text} is not a path for a file")
    return path

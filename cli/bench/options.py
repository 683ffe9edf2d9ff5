"""The flags of ``shoal bench serve``."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.bench.arrivals import MAX_BURSTINESS, MIN_BURSTINESS
from cli.bench.lengths import FORMS, MAX_LENGTH, Lengths
from cli.bench.settings import DEFAULT_CONCURRENCY, DEFAULT_NUM_REQUESTS, Settings
from cli.bench.workload import FIRST_ID
from cli.flags import Parser, add_server, argument_type, number, result_file, whole

TARGETS = ("ttft", "tpot", "e2e")
MAX_COUNT = 10_000_000
MAX_S = 1e6
MAX_RATE = 1e6


def parse(arguments: list[str]) -> Settings:
    """Raises ConfigError; ``--help`` exits."""
    return Settings(**vars(_parser().parse_args(arguments)))


def _parser() -> Parser:
    parser = Parser(
        "shoal bench serve",
        usage="shoal bench serve [--flag VALUE …]",
        description="Sends requests to an OpenAI-compatible server and reports how it answers.",
        epilog="Exit codes: 0; 1: nothing was answered, or the verdict is no; 2: a wrong flag or"
        " file, or no server at --url; 130: Ctrl-C.",
    )
    _add_target(parser.add_argument_group("the server").add_argument)
    _add_load(parser.add_argument_group("the load").add_argument)
    _add_requests(parser.add_argument_group("the requests").add_argument)
    _add_sampling(parser.add_argument_group("sampling").add_argument)
    _add_report(parser.add_argument_group("the report").add_argument)
    return parser


def _add_target(add: Callable[..., Any]) -> None:
    add_server(add)
    add("--model", help="(default: the first the server lists)")
    add("--endpoint", choices=("completions", "chat"), default="completions")
    text = "seconds without data after which a request fails (default: %(default)g)"
    add("--timeout", type=number(0.001, MAX_S), default=600.0, metavar="S", help=text)


def _add_load(add: Callable[..., Any]) -> None:
    text = f"(default: {DEFAULT_NUM_REQUESTS}, or all of the trace)"
    add("--num-requests", type=whole(1, MAX_COUNT), metavar="N", help=text)
    text = f"most requests open at once (default: {DEFAULT_CONCURRENCY}; with a rate unlimited)"
    add("--concurrency", type=whole(1, 100_000), metavar="N", help=text)
    text = "sent per second, independent of the answers"
    add("--request-rate", type=number(1e-6, MAX_RATE), metavar="R", help=text)
    text = "shape of the gaps' gamma distribution: 1 is Poisson, less is burstier"
    shape = number(MIN_BURSTINESS, MAX_BURSTINESS)
    add("--burstiness", type=shape, default=1.0, metavar="B", help=text)
    add("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="(default: 0)")
    text = "sent before, not counted (default: 0)"
    add("--warmup", type=whole(0, MAX_COUNT), default=0, metavar="N", help=text)
    text = "tests this rate with 150 %% of it; exit code 0: the server keeps up, 1: it does not"
    add("--verdict", type=number(1e-6, MAX_RATE), metavar="RATE", help=text)
    text = "seconds of a verdict's load (default: 60)"
    add("--duration", type=number(0.1, MAX_S), metavar="S", help=text)


def _add_requests(add: Callable[..., Any]) -> None:
    forms = f"tokens, a number or one of {', '.join(FORMS.values())}"
    length = argument_type(Lengths.parse)
    text = f"{forms} (default: 128); words in a chat"
    add("--input-len", type=length, default=Lengths("fixed", 128), metavar="L", help=text)
    text = "the same for answers (default: 128)"
    add("--output-len", type=length, default=Lengths("fixed", 128), metavar="L", help=text)
    text = "tokens of a common prefix, in addition to --input-len (default: 0)"
    add("--prefix-len", type=whole(0, MAX_LENGTH), default=0, metavar="N", help=text)
    text = "different common prefixes (default: 1)"
    add("--num-prefixes", type=whole(1, MAX_COUNT), default=1, metavar="N", help=text)
    text = f"prompts have ids from {FIRST_ID} up to this (default: %(default)s)"
    sizes = whole(FIRST_ID + 1, 2**31)
    add("--vocab-size", type=sizes, default=1000, metavar="N", help=text)
    text = "JSON lines with prompt or messages, max_tokens and timestamp; instead of random ones"
    add("--trace", type=Path, metavar="FILE", help=text)
    text = "sends the trace at its timestamps (seconds)"
    add("--replay", action="store_true", help=text)


def _add_sampling(add: Callable[..., Any]) -> None:
    text = "answers have exactly the requested length (default: yes)"
    add("--ignore-eos", action=argparse.BooleanOptionalAction, default=True, help=text)
    text = "(default: %(default)g)"
    add("--temperature", type=number(0, 100), default=0.0, metavar="T", help=text)
    add("--logprobs", type=whole(0, MAX_LENGTH), metavar="K", help="logprobs of each token")
    text = "additional fields of each request"
    add("--extra-body", type=argument_type(_object), default={}, metavar="JSON", help=text)


def _add_report(add: Callable[..., Any]) -> None:
    text = (
        "targets in ms, for example ttft=200,tpot=50 (also e2e); reports the share that meets all"
    )
    add("--goodput", type=targets, default={}, metavar="TARGETS", help=text)
    add("--json", type=result_file, metavar="FILE", help="writes everything there")
    add("--rows", action="store_true", help="with a row for each request")


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"'{text}' is not a JSON object")
    return value


@argument_type
def targets(text: str) -> dict[str, float]:
    found = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in TARGETS:
            raise ValueError(f"'{name}' is not one of {', '.join(TARGETS)}")
        found[name] = number(0.001, MAX_S * 1000)(value)
    return found

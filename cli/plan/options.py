"""The flags of ``shoal plan``."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.bench.lengths import MAX_LENGTH, Lengths
from cli.bench.options import MAX_RATE, targets
from cli.flags import Parser, argument_type, number, result_file, whole
from cli.plan.cards import CARDS

PROGRAM = "shoal plan"
ALL = "all"


def parse(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Splits the arguments into ours and the worker's. Raises ConfigError; ``--help`` exits."""
    model, rest = arguments[:1], arguments[1:]
    if not model or model[0].startswith("-"):
        model, rest = [], arguments
    parser = Parser(
        PROGRAM,
        usage=f"{PROGRAM} [MODEL] [--requests FILE] [--card CARD] [--setting value …]",
        description="Plans the serving of a model: memory, settings, workers, tokens/s.",
        epilog="All settings of the worker are allowed too. Exit codes: 0: it fits; 1: it does not,"
        " or no number of workers is enough; 2: a wrong setting or file.",
    )
    _add_load(parser.add_argument)
    _add_machine(parser.add_argument)
    _add_answer(parser.add_argument)
    given, settings = parser.parse_known_args(rest)
    return given, [*(f"--model={name}" for name in model), *settings]


def _add_load(add: Callable[..., Any]) -> None:
    text = "a log: JSON lines with tokens or texts, and perhaps times"
    add("--requests", type=Path, metavar="FILE", help=text)
    length = argument_type(Lengths.parse)
    text = "without a log: tokens, or as in bench serve (512)"
    add("--input-len", type=length, default=Lengths("fixed", 512), metavar="L", help=text)
    text = "the same for answers, also where a log has none (256)"
    add("--output-len", type=length, default=Lengths("fixed", 256), metavar="L", help=text)
    text = "requests a second, instead of the log's times"
    add("--request-rate", type=number(1e-6, MAX_RATE), metavar="R", help=text)
    text = "open at once, if there are no times"
    add("--concurrency", type=whole(1, 100_000), metavar="N", help=text)
    text = "requests to play, the first ones (%(default)s)"
    add("--num-played", type=whole(1, 100_000), default=500, metavar="N", help=text)


def _add_machine(add: Callable[..., Any]) -> None:
    text = f"not this machine: {', '.join(CARDS)} or {ALL}"
    add("--card", choices=(*CARDS, ALL), metavar="CARD", help=text)
    text = "share of a GPU's speed in steps (0.6, assumed)"
    add("--efficiency", type=number(0.01, 1), default=0.6, metavar="SHARE", help=text)
    text = "results of `shoal bench engine`, for the times of steps"
    add("--measured", type=Path, nargs="+", default=[], metavar="FILE", help=text)
    text = "skip the measurement of steps on this machine"
    add("--no-measure", action="store_true", help=text)


def _add_answer(add: Callable[..., Any]) -> None:
    text = "ms for 99 %% of requests: ttft=500,tpot=50 (also e2e)"
    add("--goodput", type=targets, default={}, metavar="TARGETS", help=text)
    text = "price of a GPU, or of this machine, per hour"
    add("--price-per-hour", type=number(0.0001, 1e6), metavar="P", help=text)
    add("--json", type=result_file, metavar="FILE", help="writes everything there")


def drawn_max(lengths: Lengths) -> int:
    """The answer's length if the log has none."""
    return min(int(lengths.first), MAX_LENGTH)

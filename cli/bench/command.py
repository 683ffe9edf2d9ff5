"""``shoal bench``: the load client ``serve``, the measurements ``engine`` and ``quality``, and
``compare`` for two results."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import process_time
from typing import Any

import numpy as np
import uvloop
from rich.console import Console

from cli.bench import arrivals, report, trace, verdict
from cli.bench.client import Send, client, offer
from cli.bench.compare import compare
from cli.bench.engine import engine
from cli.bench.figures import figures
from cli.bench.options import parse
from cli.bench.origin import write
from cli.bench.quality import quality
from cli.bench.result import Result
from cli.bench.row import Row
from cli.bench.settings import Settings
from cli.bench.workload import Request, random_requests, traced_requests
from cli.console import bar, console_for_people
from cli.exit_codes import INTERRUPTED, OK, WRONG
from shared.errors import ConfigError

USAGE = """\
usage: shoal bench serve [--url URL] [--concurrency N | --request-rate R] …

  loads an OpenAI-compatible server and reports how it answers; shoal bench serve --help

usage: shoal bench engine [--concurrency N] [--setting of the worker value …]

  times the steps of the engine alone, without sockets; shoal bench engine --help

usage: shoal bench quality [--quantization FORMS] [--setting of the worker value …]

  measures the loss of quality with weights in 8 or 4 bits; shoal bench quality --help

usage: shoal bench compare A B

  compares two files that --json wrote; shoal bench compare --help"""


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0; 1 if nothing was answered or the verdict is no; 2 for a wrong
    setting or a server that does not answer."""
    if arguments in ([], ["-h"], ["--help"]):
        print(USAGE)
        return OK
    name, *flags = arguments
    if name not in COMMANDS:
        print(f"shoal bench: no such command: {name}\n\n{USAGE}", file=sys.stderr)
        return WRONG
    try:
        return COMMANDS[name](flags)
    except ConfigError as error:
        print(f"shoal bench {name}: {error}", file=sys.stderr)
        return WRONG
    except KeyboardInterrupt:
        print(f"shoal bench {name}: stopped before the end", file=sys.stderr)
        return INTERRUPTED


def _serve(arguments: list[str]) -> int:
    settings = parse(arguments)
    lines, num = what_to_send(settings)
    _allow_many_sockets()
    result = uvloop.run(measure(settings, lines, num, Console(stderr=True, highlight=False)))
    with console_for_people() as console:
        report.show(result, console)
    if settings.json is not None:
        write(result.as_dict(arguments), settings.json)
    is_refused = result.verdict is not None and not result.verdict["keeps_up"]
    return int(is_refused or result.figures["num_failed"] == num)


def what_to_send(settings: Settings) -> tuple[list[trace.TraceLine] | None, int]:
    """The lines of a trace (if any), and the number of measured requests. Raises ConfigError."""
    lines = None
    if settings.trace is not None:
        lines = trace.read(settings.trace, settings.endpoint, settings.replay)
    return lines, settings.num_measured(None if lines is None else len(lines))


async def measure(
    settings: Settings, lines: list[trace.TraceLine] | None, num: int, console: Console
) -> Result:
    """Warms the server up and loads it with ``num`` requests, from ``lines`` if given."""
    async with client(settings) as server:
        model = settings.model or await server.model()
        rng = np.random.default_rng([settings.seed, 0])
        if lines is None:
            requests = random_requests(settings, model, settings.warmup + num, rng)
        else:
            lines = lines[: settings.warmup + num]
            requests = traced_requests(settings, model, lines, rng)
        first, counted = requests[: settings.warmup], requests[settings.warmup :]
        await offer(first, arrivals.all_at_once(len(first)), settings.max_open, server.send)
        times = _times(settings, lines, num)
        with _progress(console, server.send, num) as send:
            cpu_s = process_time()
            rows = await offer(counted, times, settings.max_open, send)
            cpu_s = process_time() - cpu_s
    found = figures(rows, settings.goodput, settings.is_open_loop)
    return Result(
        settings=settings,
        model=model,
        rows=rows,
        figures=found,
        client_cpu_s=cpu_s,
        verdict=_verdict(settings, rows, found),
    )


@contextmanager
def _progress(console: Console, send: Send, num: int) -> Iterator[Send]:
    """Wraps ``send`` so that each end advances the bar."""
    num_failed = 0
    with bar(console, num, "{task.fields[failed]} failed", failed=0) as update:

        async def shown(request: Request, due_s: float) -> Row:
            nonlocal num_failed
            row = await send(request, due_s)
            num_failed += bool(row.error)
            update(advance=1, failed=num_failed)
            return row

        yield shown


def _times(settings: Settings, lines: list[trace.TraceLine] | None, num: int) -> arrivals.Times:
    if settings.replay and lines is not None:
        return arrivals.from_timestamps([line.timestamp or 0.0 for line in lines[-num:]])
    if settings.rate is None:
        return arrivals.all_at_once(num)
    rng = np.random.default_rng([settings.seed, 1])
    return arrivals.at_rate(num, settings.rate, settings.burstiness, rng)


def _verdict(settings: Settings, rows: list[Row], found: dict[str, Any]) -> dict[str, Any] | None:
    if settings.verdict is None or settings.rate is None:
        return None
    objections = verdict.objections(rows, found)
    sentence = verdict.sentence(settings.verdict, settings.rate, settings.duration_s, objections)
    return {"keeps_up": not objections, "sentence": sentence, "objections": objections}


def _allow_many_sockets() -> None:
    """Raises the soft limit of open files to the hard one: each open request needs a socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


COMMANDS = {"serve": _serve, "engine": engine, "quality": quality, "compare": compare}

"""``shoal run-batch``: answers the requests in a file, and resumes after an interruption."""

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any

import aiohttp
from rich.console import Console

from cli.batch.options import Options, parse
from cli.batch.progress import shown
from cli.exit_codes import FAILED, INTERRUPTED, WRONG
from cli.own_mesh import own_mesh
from cli.session import session_with
from cli.supervisor import StartFailedError
from cli.table import is_shown
from shared.batch.check import Checked, check
from shared.batch.results import ResultFile, WrongResults
from shared.batch.run import BatchRun, Counts, Plan, read_results
from shared.client.sender import BatchStopped, KeyRefused, Sender
from shared.errors import ConfigError
from shared.settings.load import load_settings
from shared.settings.serve import ServeConfig

STOPPED = 3


@dataclass
class Outcome:
    """``stopped`` is the reason for an early end; empty if the run reached the end."""

    counts: Counts
    num_done_before: int
    seconds: float = 0.0
    stopped: str = ""
    code: int = 0


def main(arguments: list[str]) -> int:
    """Returns the exit code; see ``options``."""
    try:
        options, settings = parse(arguments)
        config = load_settings(ServeConfig, settings, "shoal run-batch", vars(options))
        checked = _checked(options)
        with ResultFile(options.output_file, checked.digest) as results:
            outcome = _run(options, config, checked, results)
    except (ConfigError, WrongResults, BatchStopped) as error:
        print(f"shoal run-batch: {error}", file=sys.stderr)
        return STOPPED if isinstance(error, BatchStopped) else WRONG
    _report(options, outcome)
    return outcome.code


def _checked(options: Options) -> Checked:
    """Raises ConfigError for an unreadable file and for duplicate ids."""
    try:
        checked = check(options.input_file, options.max_line_bytes)
    except OSError as error:
        raise ConfigError(f"--input-file: {options.input_file}: {error.strerror}") from None
    if checked.duplicates:
        lines = "\n".join(f"  {each.message}" for each in checked.duplicates)
        raise ConfigError(f"--input-file: duplicate ids, so nothing was sent:\n{lines}")
    return checked


def _run(options: Options, config: ServeConfig, checked: Checked, results: ResultFile) -> Outcome:
    counts = Counts(checked.num_requests)
    plan = Plan(
        options.input_file,
        checked.digest,
        options.max_line_bytes,
        checked.num_lines,
        priority=options.priority,
    )
    done = read_results((results,), checked.num_lines, counts)
    outcome = Outcome(counts, counts.completed + counts.failed)
    started_s = time.monotonic()
    console = Console(stderr=True, highlight=False, emoji=False, soft_wrap=True)
    if outcome.num_done_before < counts.total:
        with shown(console, counts) as screen:

            def on_line(line: str) -> None:
                if is_shown(line, config, console):
                    screen.print(line)

            async def answer() -> None:
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, _cancel_this())
                async with _server(options, config, on_line) as session:
                    sender = Sender(session, options.retry, options.timeout)
                    run = BatchRun(
                        plan=plan,
                        good=results,
                        bad=results,
                        counts=counts,
                        done=done,
                        send=sender.send,
                    )
                    run.on_result = screen.update
                    await run.run(options.max_concurrent_requests)

            outcome.code, outcome.stopped = _code_of(answer)
    results.sync()
    outcome.seconds = time.monotonic() - started_s
    if not outcome.code and counts.failed:
        outcome.code = FAILED
    return outcome


def _cancel_this() -> Callable[[], object]:
    task = asyncio.current_task()
    assert task is not None
    return task.cancel


def _code_of(answer: Callable[[], Any]) -> tuple[int, str]:
    """The exit code, and the reason for an early end."""
    code, reason = 0, ""
    try:
        asyncio.run(answer())
    except* (ConfigError, StartFailedError, KeyRefused) as errors:
        code, reason = WRONG, str(_first_leaf(errors))
    except* BatchStopped as errors:
        code, reason = STOPPED, str(_first_leaf(errors))
    except* (KeyboardInterrupt, asyncio.CancelledError):
        code, reason = INTERRUPTED, "stopped by a signal"
    return code, reason


def _first_leaf(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    error = errors.exceptions[0]
    return _first_leaf(error) if isinstance(error, BaseExceptionGroup) else error


@asynccontextmanager
async def _server(
    options: Options, config: ServeConfig, on_line: Callable[[str], None]
) -> AsyncIterator[aiohttp.ClientSession]:
    if options.url is None:
        async with own_mesh(config, on_line) as session:
            yield session
        return
    async with session_with(options.url, options.api_key) as session:
        yield session


def _report(options: Options, outcome: Outcome) -> None:
    counts = outcome.counts
    num_done = counts.completed + counts.failed
    print(
        f"{num_done} of {counts.total} lines are in {options.output_file}: {counts.completed}"
        f" answered, {counts.failed} failed; {num_done - outcome.num_done_before} in this run, with"
        f" {counts.num_output_tokens} tokens in {outcome.seconds:.1f} s"
    )
    if outcome.stopped:
        again = "" if outcome.code == WRONG else "; the same command resumes"
        print(f"shoal run-batch: {outcome.stopped}{again}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(_summary(options, outcome), indent=2) + "\n")


def _summary(options: Options, outcome: Outcome) -> dict[str, Any]:
    return {
        "input_file": str(options.input_file),
        "output_file": str(options.output_file),
        **asdict(outcome.counts),
        "num_done_before": outcome.num_done_before,
        "seconds": outcome.seconds,
        "output_tokens_per_s": outcome.counts.num_output_tokens / max(outcome.seconds, 1e-3),
        "stopped": outcome.stopped or None,
        "exit_code": outcome.code,
    }

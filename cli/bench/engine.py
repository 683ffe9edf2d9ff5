"""``shoal bench engine``: times the steps of the engine alone, with the worker's settings."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from cli.bench.figures import PERCENTILES, spread
from cli.bench.lengths import MAX_LENGTH, Lengths
from cli.bench.options import MAX_COUNT
from cli.bench.origin import origin, write
from cli.bench.workload import FIRST_ID
from cli.console import console_for_people
from cli.flags import Parser, argument_type, result_file, whole
from shared.errors import ConfigError
from shared.settings.load import load_settings
from shared.settings.worker import WorkerConfig

if TYPE_CHECKING:
    from cli.bench.engine_loop import Job, Step

PROGRAM = "shoal bench engine"
PACKAGES = ("shoal", "torch", "numpy")
SEED = 0
KINDS = {"prefill": "steps with a prompt", "decode": "steps without one"}


def engine(arguments: list[str]) -> int:
    """Returns the exit code. Raises ConfigError."""
    load, rest = _parse(arguments)
    settings = load_settings(WorkerConfig, rest, PROGRAM, vars(load))
    found = measure(load, settings)
    with console_for_people() as console:
        _show(found, console)
    if load.json is not None:
        write(origin("engine", arguments, PACKAGES) | found, load.json)
    return 0


def measure(load: Namespace, settings: WorkerConfig) -> dict[str, Any]:
    """The effective settings and the figures, for JSON."""
    from cli.bench.engine_loop import EngineLoop  # imports torch, which takes seconds

    loop = EngineLoop(settings)
    if load.concurrency > loop.capacity.max_num_seqs:
        limit = f"max-num-seqs = {loop.capacity.max_num_seqs}"
        raise ConfigError(f"--concurrency: {load.concurrency} is more than {limit}")
    jobs = _jobs(load, loop.model.vocab_size)
    loop.warm_up(jobs[: load.concurrency], load.logprobs)
    steps = loop.run(jobs, load.concurrency, load.logprobs)
    given = {name: value for name, value in vars(load).items() if name != "json"}
    lengths = {name: str(given[name]) for name in ("input_len", "output_len")}
    return {
        "settings": given | lengths | {"num_requests": len(jobs)},
        "worker": settings.model_dump(mode="json", exclude_defaults=True, exclude={"instance"}),
        "model": Path(settings.model).name,
        "figures": figures(steps, loop.weights_bytes) | {"num_preemptions": loop.num_preemptions},
    }


def figures(steps: "Sequence[Step]", weights_bytes: int) -> dict[str, Any]:
    """Rates are of the engine's own time. A step with prompt tokens counts for the prefill rate
    only, any other step for the decode rate. A step reads all weights; with one row, that is nearly
    all it does."""
    kinds = {
        "prefill": [step for step in steps if step.num_prompt_tokens],
        "decode": [step for step in steps if not step.num_prompt_tokens],
    }
    seconds = {kind: sum(step.engine_s for step in each) for kind, each in kinds.items()}
    scheduling_s = sum(step.scheduling_s for step in steps)
    num_prompt_tokens = sum(step.num_prompt_tokens for step in steps)
    num_decoded = sum(step.num_decoded for step in kinds["decode"])
    step_ms = {kind: spread([step.engine_s for step in each]) for kind, each in kinds.items()}
    return {
        "num_steps": {kind: len(each) for kind, each in kinds.items()},
        "prefill_tokens_per_s": _per_s(num_prompt_tokens, seconds["prefill"]),
        "decode_tokens_per_s": _per_s(num_decoded, seconds["decode"]),
        "step_ms": step_ms,
        "scheduling_share": scheduling_s / (scheduling_s + sum(seconds.values())),
        "weights_bytes": weights_bytes,
        "weights_bytes_per_s": step_ms["decode"] and weights_bytes * 1e3 / step_ms["decode"]["p50"],
    }


def _per_s(num: int, seconds: float) -> float | None:
    return num / seconds if seconds else None


def _jobs(load: Namespace, vocab_size: int) -> "list[Job]":
    from cli.bench.engine_loop import Job

    rng = np.random.default_rng(SEED)
    num = load.num_requests or load.concurrency
    input_lens, output_lens = load.input_len.draw(num, rng), load.output_len.draw(num, rng)
    return [
        Job(rng.integers(FIRST_ID, vocab_size, input_len, dtype=np.int32), output_len)
        for input_len, output_len in zip(input_lens, output_lens, strict=True)
    ]


def _parse(arguments: list[str]) -> tuple[Namespace, list[str]]:
    """Splits the arguments into ours and the worker's. Raises ConfigError; ``--help`` exits."""
    parser = Parser(
        PROGRAM,
        usage=f"{PROGRAM} [--flag VALUE …]",
        description="Times the steps of the engine alone. Takes all settings of the worker as well:"
        " shoal worker --help",
        epilog="Exit codes: 0; 2: a wrong flag or setting; 130: Ctrl-C.",
    )
    _add_load(parser.add_argument)
    return parser.parse_known_args(arguments)


def _add_load(add: Callable[..., Any]) -> None:
    length = argument_type(Lengths.parse)
    text = "tokens, a number or a distribution as in bench serve (default: 128)"
    add("--input-len", type=length, default=Lengths("fixed", 128), metavar="L", help=text)
    text = "the same for answers (default: 128)"
    add("--output-len", type=length, default=Lengths("fixed", 128), metavar="L", help=text)
    text = "sequences at once (default: 1)"
    add("--concurrency", type=whole(1, 100_000), default=1, metavar="N", help=text)
    text = "(default: as many as at once)"
    add("--num-requests", type=whole(1, MAX_COUNT), metavar="N", help=text)
    add("--logprobs", type=whole(0, MAX_LENGTH), metavar="K", help="logprobs of each token")
    add("--json", type=result_file, metavar="FILE", help="writes everything there")


def _show(found: dict[str, Any], console: Console) -> None:
    console.print(_summary(found))
    console.print(_step_times(found["figures"]))


def _summary(found: dict[str, Any]) -> Table:
    report, load = found["figures"], found["settings"]
    table = Table.grid(padding=(0, 3))
    facts = {
        "model": found["model"],
        "requests": f"{load['num_requests']}, {load['concurrency']} at once",
        "prefill": f"{_number(report['prefill_tokens_per_s'])} tokens/s",
        "decode": f"{_number(report['decode_tokens_per_s'])} tokens/s",
        "scheduling": f"{report['scheduling_share']:.2%} of the time",
        "weights": f"{report['weights_bytes'] / 1e6:.1f} MB, read in a decode step at"
        f" {_number(report['weights_bytes_per_s'], 1e9)} GB/s",
    }
    if report["num_preemptions"]:
        facts["warning"] = f"the KV cache is too small: {report['num_preemptions']} preemptions"
    for name, text in facts.items():
        table.add_row(name, text)
    return table


def _step_times(report: dict[str, Any]) -> Table:
    table = Table()
    for name in ("ms", "steps", "mean", *(f"P{each}" for each in PERCENTILES)):
        table.add_column(name, justify="left" if name == "ms" else "right")
    for kind, name in KINDS.items():
        times = report["step_ms"][kind]
        cells = [f"{value:.2f}" for value in times.values()] if times else ["–"] * 4
        table.add_row(name, str(report["num_steps"][kind]), *cells)
    return table


def _number(value: float | None, unit: float = 1.0) -> str:
    return "–" if value is None else f"{value / unit:.1f}"

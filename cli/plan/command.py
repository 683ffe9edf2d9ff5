"""``shoal plan``: the resources of serving a model, before it is served."""

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from cli.bench.origin import described, write
from cli.command import run
from cli.console import console_for_people
from cli.exit_codes import FAILED, OK
from cli.plan import requests as log
from cli.plan.cards import CARDS, Card
from cli.plan.options import ALL, PROGRAM, drawn_max, parse
from cli.plan.requests import Request
from shared.errors import ConfigError
from shared.model_location import locate_model
from shared.settings.load import load_settings
from shared.settings.worker import WorkerConfig

if TYPE_CHECKING:
    from cli.plan.footprint import Footprint
    from cli.plan.machine import Fit
    from cli.plan.speed import MeshTimes, StepTimes

Say = Callable[[str], object]


def main(arguments: list[str]) -> int:
    """Returns the exit code: FAILED if the model does not fit or no number of workers is enough."""
    return run("plan", lambda: _plan(arguments))


def _plan(arguments: list[str]) -> int:
    given, rest = parse(arguments)
    settings = load_settings(WorkerConfig, rest, PROGRAM, vars(given))
    with Console(stderr=True).status("adds up memory …") as status:  # nothing in a pipe
        found = plan(given, settings, status.update)
    from cli.plan import report

    with console_for_people() as console:
        report.show(found, console)
    if given.json is not None:
        write(
            described("plan", " ".join(["shoal plan", *arguments]), ("shoal",)) | found, given.json
        )
    fits = any("problem" not in each for each in found["machines"])
    return OK if fits else FAILED


def plan(given: Namespace, settings: WorkerConfig, say: Say = lambda _: None) -> dict[str, Any]:
    """Requests, model, settings, and each machine, for JSON. ``say`` reports slow operations.
    Raises ConfigError."""
    from cli.plan.footprint import footprint_of  # imports torch, which takes seconds
    from cli.plan.machine import this_machine

    if settings.num_ranks > 1:
        raise ConfigError(
            f"{settings.ranks_setting}: {settings.num_ranks}: plans are for one process, or with"
            " --card for the GPUs that hold the model; omit it"
        )
    folder = locate_model(settings.model).folder
    requests = read_requests(given, folder)
    device = this_machine(settings)
    if settings.max_model_len is None:
        longest = footprint_of(settings, device).requirements.capacity.max_model_len
        settings = settings.model_copy(update={"max_model_len": log.enough_len(requests, longest)})
    footprint = footprint_of(settings, device)
    needs, capacity = footprint.requirements, footprint.requirements.capacity
    return {
        "model": {
            "name": folder.name,
            "parameters": footprint.parameters.total,
            "active_parameters": footprint.parameters.active,
            "weights_bytes": needs.weights,
            "step_bytes": needs.peak,
            "kv_bytes_per_token": footprint.kv_per_token,
            "read_bytes_of_one_token": int(footprint.read_by(1)),
        },
        "requests": log.describe(requests),
        "settings": {
            "max_model_len": capacity.max_model_len,
            "max_num_seqs": capacity.max_num_seqs,
            "quantization": settings.quantization,
            "lm_head_quantization": settings.lm_head_quantization,
            "embedding_quantization": settings.embedding_quantization,
            "kv_cache_dtype": settings.kv_cache_dtype,
            "num_too_long": sum(
                each.num_prompt_tokens + each.num_output_tokens > capacity.max_model_len
                for each in requests
            ),
        },
        "machines": [
            _on(given, settings, footprint, requests, card, say) for card in _cards(given.card)
        ],
    }


def _cards(name: str | None) -> list[Card | None]:
    """GPUs by name; None is this machine."""
    if name is None:
        return [None]
    return list(CARDS.values()) if name == ALL else [CARDS[name]]


def read_requests(given: Namespace, folder: Path) -> list[Request]:
    """Raises ConfigError."""
    if given.requests is None:
        rng = np.random.default_rng(0)
        inputs = given.input_len.draw(given.num_played, rng)
        requests = log.made_up(inputs, given.output_len.draw(given.num_played, rng))
    else:
        requests = log.read(given.requests, log.Tokenizer(folder), drawn_max(given.output_len))
    return requests if given.request_rate is None else log.at_rate(requests, given.request_rate)


def _on(
    given: Namespace,
    settings: WorkerConfig,
    footprint: "Footprint",
    requests: list[Request],
    card: Card | None,
    say: Say,
) -> dict[str, Any]:
    """The plan of a machine for ``requests``; ``problem`` explains a negative result."""
    from cli.plan.machine import fit_here, fit_on, this_machine

    name = "this machine" if card is None else card.name
    try:
        if card is None:
            fit = fit_here(settings, footprint, this_machine(settings))
        else:
            fit = fit_on(card, settings, footprint)
    except ConfigError as error:
        return {"name": name, "problem": str(error)}
    totals = log.describe(requests)["total_tokens"]
    needs, longest = fit.memory.requirements, fit.capacity.max_model_len
    lengths = {"longest": longest, "p50": totals["p50"], "p95": totals["p95"]}
    found = {
        "name": name,
        "num_cards": fit.num_cards,
        "memory_bytes": fit.memory.budget,
        "used_by_others_bytes": fit.memory.others,
        "weights_bytes": needs.weights,
        "step_bytes": needs.peak,
        "added_bytes": dict(needs.added),
        "kv_cache_bytes": fit.memory.kv_cache,
        "kv_cache_tokens": fit.num_tokens(longest),
        "num_seqs": fit.capacity.max_num_seqs,
        "num_states": fit.capacity.num_states,
        "state_bytes": fit.memory.states,
        "concurrency": {name: fit.num_tokens(each) / each for name, each in lengths.items()},
    }
    times = _times(given, settings, footprint, card, fit, say)
    if times is None:
        return found

    def say_workers(num: int) -> None:
        say(f"plays requests on {name}, workers: {num} …")

    return found | _play(given, fit, requests, *times, say_workers)


def _times(
    given: Namespace,
    settings: WorkerConfig,
    footprint: "Footprint",
    card: Card | None,
    fit: "Fit",
    say: Say,
) -> "tuple[StepTimes, MeshTimes] | None":
    """None without a source of times, such as steps of a model that decodes. Raises ConfigError."""
    from cli.plan.footprint import has_weights
    from cli.plan.machine import shares_its_cores
    from cli.plan.speed import (
        ON_CORES_OF_ITS_OWN,
        ON_SHARED_CORES,
        RooflineTimes,
        measure,
        read_measured,
    )

    if given.measured:
        return read_measured(given.measured, footprint), ON_CORES_OF_ITS_OWN
    if card is not None:
        times = RooflineTimes(footprint, card, given.efficiency, fit.num_cards)
        return times, ON_CORES_OF_ITS_OWN
    decodes = footprint.kv_per_token > 0  # encoders do not
    if given.no_measure or not decodes or not has_weights(locate_model(settings.model).folder):
        return None
    say("measures steps on this machine …")
    alone = settings.model_copy(
        update={"speculative_config": type(settings.speculative_config)(method="none")}
    )
    mesh = ON_SHARED_CORES if shares_its_cores(settings) else ON_CORES_OF_ITS_OWN
    return measure(alone, footprint, fit.capacity.max_num_seqs), mesh


def _play(
    given: Namespace,
    fit: "Fit",
    requests: list[Request],
    times: "StepTimes",
    mesh: "MeshTimes",
    say_workers: Callable[[int], object],
) -> dict[str, Any]:
    from cli.plan import sizing
    from cli.plan.replay import Played, Replay

    capacity = fit.capacity
    some = requests[: given.num_played]
    is_timed = some[0].arrived_s is not None

    def play(num_workers: int) -> Played:
        say_workers(num_workers)
        concurrency = 0 if is_timed else (given.concurrency or capacity.max_num_seqs)
        return Replay(capacity, times, mesh, num_workers).run(some, concurrency)

    has_to_choose = is_timed or given.goodput
    enough = (
        sizing.enough_workers(play, given.goodput) if has_to_choose else sizing.Enough(1, play(1))
    )
    steps = {
        str(rows): 1e3 * times.seconds(rows, rows * capacity.max_model_len // 2, 0)
        for rows in (1, 8, 32, 128)
        if rows <= capacity.max_num_seqs
    }
    found: dict[str, Any] = {
        "step_ms": steps,
        "workers": None if enough.problem else enough.num,
        "played": sizing.describe(enough.played, given.goodput),
    }
    if enough.problem:
        return found | {"problem": enough.problem}
    if given.price_per_hour is not None:
        per_hour = given.price_per_hour * enough.num * max(fit.num_cards, 1)
        tokens = found["played"]["output_tokens_per_s"] * 3600
        found["price_per_million_output_tokens"] = per_hour / tokens * 1e6
    return found

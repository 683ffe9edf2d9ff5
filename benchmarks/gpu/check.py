"""Measures the engine on a GPU in under eight minutes: step times against the memory floor and
kernel by kernel, prompts, the same through the mesh, ranks on several GPUs, each kernel against
torch, start-up, and transformers. Tests marked ``gpu`` are a section that must be named: --only
tests.

The most important sections run first, and results are written after every row, to results/
gpu-<card>-<date>.json and .md. A failed section records its error, and the next one runs.

--dry runs everything on a CPU, with a tiny model and meaningless figures, and lets Triton compile
every launch for sm_90: errors are found without a GPU.
"""

import argparse
import faulthandler
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.clocks import watched
from benchmarks.gpu.machine import describe
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import CEILINGS, SMOKE, LeftOut, Section, Sections
from benchmarks.gpu.suite import of_card, of_test
from benchmarks.report import RESULTS

BUDGET_S, DRY_BUDGET_S = 480.0, 3600.0
GRACE_S = 60.0  # then a hanging check dumps its stack and exits


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    options = _parse(arguments)
    if not options.dry and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} finds no CUDA device", file=sys.stderr)
        return 2
    suite = of_test() if options.dry else of_card()
    results = Results(options.results, describe(suite.device, arguments))
    known = results.sections.get(CEILINGS, {"rows": []})["rows"]
    with tempfile.TemporaryDirectory() as folder:
        sections = Sections(suite, Path(folder), known[0] if known else {})
        chosen = list(_chosen(sections, options.only, options.dry))
        run(chosen, results, time.monotonic() + options.seconds, suite.device)
        sections.close()
    if not chosen:
        print(f"gpu-check: --only: no section has {' or '.join(options.only)}", file=sys.stderr)
        return 2
    print(results.text(), *results.aims(), sep="\n")  # again, as the last output
    return int(any("failed" in results.sections[section.name] for section in chosen))


def run(sections: Sequence[Section], results: Results, ends_s: float, device: torch.device) -> None:
    """Runs sections until ``time.monotonic()`` reaches ``ends_s`` or the smoke section fails."""
    for number, section in enumerate(sections, 1):
        left_s = ends_s - time.monotonic()
        if left_s < section.needs_s:
            said = f"{left_s:.0f} s are left of {section.needs_s:.0f} needed"
            results.sections.setdefault(section.name, {"rows": [], "left out": said})
            results.save()
            continue
        print(f"{section.name}: {left_s:.0f} s are left", flush=True)
        found: dict[str, Any] = {"rows": []}
        results.sections[section.name] = found
        with watched(device) as clocks:
            _run(section, min(left_s, section.limit_s), found, results)
        if clocks:
            found["clocks"] = clocks
            results.save()
        if "failed" in found and section.name == SMOKE:
            return
        if "failed" in found and not _is_sound(device):
            _go_on(sections[number:], results, ends_s)


def _is_sound(device: torch.device) -> bool:
    """False if the process can no longer use its GPU, as after some errors."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"this process can no longer use the GPU: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _go_on(sections: Sequence[Section], results: Results, ends_s: float) -> None:
    """Restarts this process with the remaining sections and time; results are on disk."""
    names = [section.name for section in sections]
    if names:
        left_s = ends_s - time.monotonic()
        where = ["--seconds", f"{left_s:.0f}", "--results", str(results.path.parent)]
        module = [sys.executable, "-m", "benchmarks.gpu.check"]
        os.execv(sys.executable, [*module, *where, "--only", *names])


def _chosen(sections: Sections, words: list[str], is_dry: bool) -> Iterator[Section]:
    """The sections named by ``words``; without words all but those that must be named, which a dry
    run includes. The ceilings are measured first if they are unknown."""
    alone = list(sections.by_name_only())
    if not words:
        yield from (*sections, *(alone if is_dry else ()))
        return
    named = [each for each in sections if any(word in each.name for word in words)]
    if named and not sections.ceilings:
        yield from (each for each in sections if each.name == CEILINGS and each not in named)
    yield from named
    yield from (each for each in alone if any(word in each.name for word in words))


def _run(section: Section, limit_s: float, found: dict[str, Any], results: Results) -> None:
    started_s = time.monotonic()
    try:
        for row in section.run(limit_s):
            found["rows"].append(row)
            results.save()
    except LeftOut as reason:
        found["left out"] = str(reason)
    except Exception as error:
        found["failed"] = f"{type(error).__name__}: {error}"
        print(f"{section.name}: {found['failed']}", file=sys.stderr, flush=True)
    found["seconds"] = time.monotonic() - started_s
    results.save()


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--seconds", type=float, help=f"for all of it (default: {BUDGET_S:g})")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help="where files are written")
    text = "only sections whose names contain one of these, such as kernels or 'batch 1'"
    add("--only", nargs="+", default=[], metavar="WORD", help=text)
    add("--dry", action="store_true", help="run on a CPU, with meaningless figures")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = DRY_BUDGET_S if options.dry else BUDGET_S
    return options


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_parse(sys.argv[1:]).seconds + GRACE_S, exit=True)
    sys.exit(main(sys.argv[1:]))

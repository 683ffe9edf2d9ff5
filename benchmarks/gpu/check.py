"""What a card makes of us, in under eight minutes: the engine's steps beside the floor that memory
sets and kernel by kernel, prompts, the same through the mesh, by ranks where there are several
cards, each kernel beside torch, the start, and transformers. The tests marked ``gpu`` are a section
that runs when --only names it: tests.

The most valuable figures come first, and all that was found is on disk at any time: results/
gpu-<card>-<date>.json and .md. A section that fails says why, and the next one begins.

--dry tries everything on a CPU, with a tiny model whose figures mean nothing, and lets Triton
compile every launch for sm_90: it finds slips that would cost the time of a card.
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
GRACE_S = 60.0  # then what hangs is told and ended


def main(arguments: list[str]) -> int:
    """The exit code."""
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
    print(results.text(), *results.aims(), sep="\n")  # once more, where it is seen first
    return int(any("failed" in results.sections[section.name] for section in chosen))


def run(sections: Sequence[Section], results: Results, ends_s: float, device: torch.device) -> None:
    """Until the clock ``time.monotonic`` says ``ends_s``, or until the smoke section fails."""
    for number, section in enumerate(sections, 1):
        left_s = ends_s - time.monotonic()
        if left_s < section.needs_s:
            said = f"{left_s:.0f} s are left, and it takes {section.needs_s:.0f}"
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
    """After some errors a process can do nothing with its card any more."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the card is lost to this process: {error}", file=sys.stderr, flush=True)
        return False
    return True


def _go_on(sections: Sequence[Section], results: Results, ends_s: float) -> None:
    """With what is left, in place of this process; what was found is on disk."""
    names = [section.name for section in sections]
    if names:
        left_s = ends_s - time.monotonic()
        where = ["--seconds", f"{left_s:.0f}", "--results", str(results.path.parent)]
        module = [sys.executable, "-m", "benchmarks.gpu.check"]
        os.execv(sys.executable, [*module, *where, "--only", *names])


def _chosen(sections: Sections, words: list[str], is_dry: bool) -> Iterator[Section]:
    """Without words all but those that want a call of their own, which a dry run has time for.
    Figures say little without their ceilings, so these are found if they are not known."""
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
    add("--dry", action="store_true", help="on a CPU, where no figure means anything")
    options = parser.parse_args(arguments)
    if options.seconds is None:
        options.seconds = DRY_BUDGET_S if options.dry else BUDGET_S
    return options


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_parse(sys.argv[1:]).seconds + GRACE_S, exit=True)
    sys.exit(main(sys.argv[1:]))

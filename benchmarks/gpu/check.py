"""What a card makes of us, in under eight minutes: the marked tests, the engine's steps beside the
floor that memory sets, the same through the mesh, each kernel beside torch, and transformers.

The most valuable figures come first, and all that was found is on disk at any time: results/
gpu-<card>-<date>.json and .md. A section that fails says why, and the next one begins.
"""

import argparse
import faulthandler
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.machine import describe
from benchmarks.gpu.results import Results
from benchmarks.gpu.sections import Section, Sections
from benchmarks.gpu.suite import of_card, of_test
from benchmarks.report import RESULTS

BUDGET_S = 480.0
GRACE_S = 60.0  # then what hangs is told and ended


def main(arguments: list[str]) -> int:
    """The exit code."""
    options = _parse(arguments)
    if not options.tiny and not torch.cuda.is_available():
        print(f"gpu-check: torch {torch.__version__} finds no CUDA device", file=sys.stderr)
        return 2
    suite = of_test() if options.tiny else of_card()
    results = Results(options.results, describe(suite.device, arguments))
    with tempfile.TemporaryDirectory() as folder:
        sections = Sections(suite, Path(folder))
        chosen = (each for each in sections if _is_wanted(each, options.only))
        run(chosen, results, time.monotonic() + options.seconds)
        sections.close()
    if not results.sections:
        print(f"gpu-check: --only: no section has {' or '.join(options.only)}", file=sys.stderr)
        return 2
    print(results.text(), *results.aims(), sep="\n")  # once more, where it is seen first
    return int(any("failed" in section for section in results.sections.values()))


def run(sections: Iterable[Section], results: Results, ends_s: float) -> None:
    """Until the clock ``time.monotonic`` says ``ends_s``."""
    for section in sections:
        left_s = ends_s - time.monotonic()
        found: dict[str, Any] = {"rows": []}
        results.sections[section.name] = found
        if left_s < section.needs_s:
            found["left out"] = f"{left_s:.0f} s are left, and it takes {section.needs_s:.0f}"
            results.save()
            continue
        print(f"{section.name}: {left_s:.0f} s are left", flush=True)
        _run(section, min(left_s, section.limit_s), found, results)


def _is_wanted(section: Section, words: list[str]) -> bool:
    return any(word in section.name for word in words)


def _run(section: Section, limit_s: float, found: dict[str, Any], results: Results) -> None:
    started_s = time.monotonic()
    try:
        for row in section.run(limit_s):
            found["rows"].append(row)
            results.save()
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
    add("--seconds", type=float, default=BUDGET_S, help="for all of it (default: %(default)g)")
    add("--results", type=Path, default=RESULTS, metavar="DIR", help="where files are written")
    text = "only sections whose names contain one of these, such as kernels or 'batch 1'"
    add("--only", nargs="+", default=[""], metavar="WORD", help=text)
    add("--tiny", action="store_true", help=argparse.SUPPRESS)  # on a CPU, for a test
    return parser.parse_args(arguments)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(_parse(sys.argv[1:]).seconds + GRACE_S, exit=True)
    sys.exit(main(sys.argv[1:]))

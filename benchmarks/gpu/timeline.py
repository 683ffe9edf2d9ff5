"""Time of each kernel of a replayed step, and the device's idle time before it. Runs in its own
process, since a profiler slows down everything after it was attached."""

import json
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engine_table import ACCEPTANCE, MAX_DEPTH, Engines, Point, run_point
from benchmarks.gpu.suite import of_card, of_test

# The profiler's categories of device work, and the first event of a step: on a GPU, and on a CPU
# for tests.
WORK = {"cuda": ("kernel", "gpu_memcpy", "gpu_memset"), "cpu": ("cpu_op",)}
FIRST = {"cuda": "decode_inputs", "cpu": "aten::embedding"}


class Event(NamedTuple):
    """An event in microseconds of the device's clock."""

    name: str
    start_us: float
    us: float
    grid: str = ""

    @property
    def end_us(self) -> float:
        return self.start_us + self.us


def measure(device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Rows measured by a child process. Raises subprocess.SubprocessError if it fails or times
    out."""
    command = [sys.executable, "-m", "benchmarks.gpu.timeline", device]
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    yield from map(json.loads, done.stdout.splitlines())
    if done.returncode:
        raise subprocess.SubprocessError("\n".join(done.stderr.splitlines()[-20:]))


def main(device: str) -> None:
    """Prints each row as soon as it is measured."""
    suite = of_card() if device == "cuda" else of_test()
    one, *_, many = suite.batches
    points = Point("graphs", one), Point("graphs", many), Point("mtp", one, MAX_DEPTH, ACCEPTANCE)
    with tempfile.TemporaryDirectory() as folder:
        engines = Engines(suite, Path(folder))
        for point in points:
            for row in _rows(engines, point):
                print(json.dumps(row), flush=True)
            engines.close()


def _rows(engines: Engines, point: Point) -> Iterator[dict[str, Any]]:
    """One row for each kernel of a step, in order of first use, and one for the step itself."""
    kind = engines.suite.device.type
    activities = [ProfilerActivity.CUDA if kind == "cuda" else ProfilerActivity.CPU]
    threads = _ExperimentalConfig(profile_all_threads=True)  # for a CPU's threads
    run_point(engines, point)  # warm-up: nothing is compiled during the measurement
    with profile(activities=activities, experimental_config=threads) as profiler:
        run_point(engines, point)
        if kind == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = read_events(json.loads(path.read_text())["traceEvents"], WORK[kind])
    steps = steps_of(events, FIRST[kind])
    if not steps:
        raise RuntimeError(f"no step among {len(events)} events of the profiler")
    label = {"engine": point.kind, "num_rows": point.num_rows, "depth": point.depth}
    yield from (label | row for row in table(steps))


def read_events(trace: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[Event]:
    """Events in order of time."""
    found = [
        Event(
            each["name"],
            float(each["ts"]),
            float(each["dur"]),
            str(each.get("args", {}).get("grid", "")),
        )
        for each in trace
        if each.get("cat") in kinds and "dur" in each
    ]
    return sorted(found, key=lambda event: event.start_us)


def steps_of(events: Sequence[Event], first: str) -> list[list[Event]]:
    """Cuts events at names that contain ``first``, the beginning of a step; each piece includes the
    beginning of the next. Returns pieces with the most frequent number of events, which are the
    decode-only steps."""
    starts = [index for index, event in enumerate(events) if first in event.name]
    steps = [list(events[a : b + 1]) for a, b in pairwise(starts)]
    if not steps:
        return []
    ((length, _),) = Counter(map(len, steps)).most_common(1)
    return [step for step in steps if len(step) == length]


def table(steps: Sequence[Sequence[Event]]) -> Iterator[dict[str, Any]]:
    """Means over equal ``steps``, by name and grid. The last event of a step is the next step's
    first; the gap before it is the device waiting for the host."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    gaps: dict[tuple[str, str], list[float]] = defaultdict(list)
    for step in steps:
        end_us = step[0].start_us
        for event in step[:-1]:
            times[event.name, event.grid].append(event.us)
            gaps[event.name, event.grid].append(max(0.0, event.start_us - end_us))
            end_us = max(end_us, event.end_us)
    span_us = mean(step[-1].start_us - step[0].start_us for step in steps)
    after_us = mean(step[-1].start_us - max(each.end_us for each in step[:-1]) for step in steps)
    for key, all_us in times.items():
        name, grid = key
        yield {
            "kernel": name[:80],
            "grid": grid,
            "times": len(all_us) / len(steps),
            "us": mean(all_us),
            "gap_us": mean(gaps[key]),
            "share": (sum(all_us) + sum(gaps[key])) / len(steps) / span_us,
        }
    busy_us = sum(map(sum, times.values())) / len(steps)
    waited_us = sum(map(sum, gaps.values())) / len(steps)
    num_events = float(len(steps[0]) - 1)
    whole = {"kernel": "a step", "times": num_events, "us": busy_us, "gap_us": waited_us}
    yield whole | {"share": 1.0, "gap_after_us": after_us, "span_us": span_us}


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Clocks, power and throttling of the GPU while something runs, reported by the driver."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import IO, Any

import torch

# nvidia-smi's names and the names in results.
FIELDS = {
    "clocks.sm": "SM MHz",
    "clocks.mem": "memory MHz",
    "power.draw": "W",
    "temperature.gpu": "°C",
}
REASONS = "clocks_event_reasons.active"  # bits: reasons for lowered clocks
IDLE = 1  # the first bit
INTERVAL_MS = 200


@contextmanager
def watched(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yields a dict, filled at the end with the figures of the time within; empty without a CUDA
    device."""
    found: dict[str, Any] = {}
    if device.type != "cuda":
        yield found
        return
    with tempfile.TemporaryFile("w+") as lines:
        process = _sampler(str(torch.cuda.get_device_properties(device).uuid), lines)
        try:
            yield found
        finally:
            if process is not None:
                process.kill()
                process.wait()
            lines.seek(0)
            found |= summary(lines.read().splitlines())


def _sampler(uuid: str, lines: IO[str]) -> "subprocess.Popen[str] | None":
    what = f"--query-gpu={','.join([*FIELDS, REASONS])}"
    which = f"--id=GPU-{uuid.removeprefix('GPU-')}"
    how = ["--format=csv,noheader,nounits", f"--loop-ms={INTERVAL_MS}"]
    try:
        return subprocess.Popen(
            ["nvidia-smi", which, what, *how], stdout=lines, stderr=lines, text=True
        )
    except OSError as error:
        print(f"no clocks: {error}", flush=True)
        return None


def summary(lines: list[str]) -> dict[str, Any]:
    """Minimum, median and maximum of each figure, and all reasons seen, from lines of ``FIELDS``
    and ``REASONS``, the last possibly cut off. Unreadable lines are kept."""
    cells = [line.split(", ") for line in lines if line.strip()]
    rows = [row for row in cells if len(row) == len(FIELDS) + 1]
    try:
        samples = [[float(value) for value in row[:-1]] for row in rows]
        reasons = {int(row[-1], 16) for row in rows}
    except ValueError:
        return {"unreadable": lines[:3]}
    if not samples:
        return {"unreadable": lines[:3]} if cells else {}
    figures = zip(FIELDS.values(), zip(*samples, strict=True), strict=True)
    found: dict[str, Any] = {
        name: [min(values), median(values), max(values)] for name, values in figures
    }
    held_back = sorted(reason for reason in reasons if reason & ~IDLE)
    return found | {"reasons": [f"0x{reason:x}" for reason in held_back]}

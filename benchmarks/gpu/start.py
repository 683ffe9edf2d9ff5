"""Start of an engine with default settings: with an empty cache of compiled kernels, and with a
full one."""

import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.settings.worker import WorkerConfig

CACHE = "TRITON_CACHE_DIR"


def measure(folder: Path, device: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Seconds of the whole process, and the worker's log lines about memory and graphs. Raises
    subprocess.SubprocessError if it does not start in time."""
    command = [sys.executable, "-m", "benchmarks.gpu.start", str(folder), device]
    ends_s = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            started_s = time.monotonic()
            done = subprocess.run(
                command,
                env=os.environ | {CACHE: cache},
                capture_output=True,
                text=True,
                timeout=max(1.0, ends_s - started_s),
                check=False,
            )
            if done.returncode:
                raise subprocess.SubprocessError("\n".join(done.stderr.splitlines()[-20:]))
            seconds = time.monotonic() - started_s
            found: dict[str, Any] = json.loads(done.stdout)
            yield (
                {"kernels": name, "seconds": seconds} | found | {"output": done.stderr.splitlines()}
            )


def _start(folder: str, device: str) -> dict[str, float]:
    """Seconds of the engine's start, without Python's imports."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms  %(message)s")
    from services.worker.engine.device.engine import DeviceEngine  # importing torch takes seconds

    started_s = time.monotonic()
    settings = WorkerConfig(model=folder, load_format="dummy", device=device)
    DeviceEngine(settings, lambda text, fraction: None)
    return {"engine_seconds": time.monotonic() - started_s}


if __name__ == "__main__":
    print(json.dumps(_start(*sys.argv[1:])))

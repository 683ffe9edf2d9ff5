"""The sections of the check, most important first."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.gpu import (
    engine_table,
    floor,
    kernel_table,
    mesh_table,
    prompt_table,
    start,
    store_table,
    timeline,
)
from benchmarks.gpu.engine_table import Engines, Point
from benchmarks.gpu.precision import as_torch_has_it
from benchmarks.gpu.suite import Suite, of_launches
from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine
from kernels import switches
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.host import HostEngine
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from shared.wire.messages import SamplingParams

ROOT = Path(__file__).parent.parent.parent
NUM_LINES_TOLD = 3000  # pytest's last lines: failures and slow tests
TOLD_S = 45.0  # reserved for pytest's report at the time limit
SMOKE, CEILINGS = "smoke", "ceilings"
SMOKE_LENGTHS = (1, 20, 300)  # prompts; the longest uses cuBLAS GEMMs
SMOKE_TOKENS = 24
SMOKE_DRAFTS = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
Rows = Iterator[dict[str, Any]]


class LeftOut(Exception):
    """A section cannot run here; the message is the reason."""


class Section(NamedTuple):
    """``run`` yields rows, within ``limit_s`` seconds if possible, or raises LeftOut. A section
    starts only with ``needs_s`` left."""

    name: str
    needs_s: float
    limit_s: float
    run: Callable[[float], Rows]


class Sections:
    """``ceilings`` are earlier results; without them the first section measures them."""

    def __init__(self, suite: Suite, folder: Path, ceilings: dict[str, float]) -> None:
        self._suite = suite
        self._folder = folder
        self._engines = Engines(suite, folder)
        self.ceilings = ceilings

    def __iter__(self) -> Iterator[Section]:
        engine = {
            name: Section(f"engine, {name}", 30, 120, partial(self._engine, points))
            for name, points in engine_table.points(self._suite)
        }
        first = ("batch 1", "batch 1, drafts", "batches")
        yield Section(SMOKE, 20, 120, self._smoke)
        yield Section(CEILINGS, 10, 30, self._find_ceilings)
        yield from (engine.pop(name) for name in first)
        yield Section("prompts", 20, 60, self._prompts)
        yield engine.pop("logprobs")
        yield Section("prompts that join", 60, 120, self._mixed)
        yield Section("timeline of a step", 60, 120, self._timeline)
        yield Section("mesh", 90, 180, self._mesh)
        yield Section("stores", 90, 180, self._stores)
        yield Section("ranks", 90, 180, self._ranks)
        yield Section("kernels", 20, 100, self._kernels)
        yield Section("switches", 60, 120, self._switches)
        yield from engine.values()
        yield Section("other configurations", 20, 60, self._sweeps)
        yield Section("transformers", 45, 120, self._peers)
        yield Section("start", 180, 240, self._start)

    def by_name_only(self) -> Iterator[Section]:
        """Sections that run only if named."""
        if self._suite.device.type == "cuda":
            yield Section("tests", 60, 540, partial(run_tests, marked_files()))
        else:
            yield Section("launches", 0, 3600, self._launches)

    def close(self) -> None:
        self._engines.close()

    def _smoke(self, limit_s: float) -> Rows:
        """Raises RuntimeError if the embedded model's outputs differ from the host engine's."""
        rng = np.random.default_rng(0)
        prompts = [rng.integers(1, 500, length).tolist() for length in SMOKE_LENGTHS]
        rules = SamplingParams(seed=0, temperature=0.0, max_tokens=SMOKE_TOKENS, ignore_eos=True)

        def engine(build: Callable[..., AnyEngine], device: str, **changes: Any) -> AnyEngine:
            limits: Any = {"max_num_seqs": 4, "max_model_len": 512, "num_gpu_blocks_override": 200}
            settings = WorkerConfig(model=EMBEDDED_MODEL, device=device, **(limits | changes))
            return build(settings, lambda text, fraction: None)

        plain = {"speculative_config": {"method": "none"}}
        exact = {"dtype": "float32"}
        host = engine(HostEngine, "cpu", native_kernels=False, **plain, **exact)
        expected = scheduled.run(host, prompts, rules).texts
        kinds: dict[str, dict[str, Any]] = {
            "graphs": plain | exact,
            "eager": plain | exact | {"enforce_eager": True},
            "drafts": exact | {"speculative_config": SMOKE_DRAFTS},
            "model dtype": plain,
        }
        for kind, settings in kinds.items():
            started_s = time.monotonic()
            device = engine(DeviceEngine, self._suite.device.type, **settings)
            ready_s = time.monotonic() - started_s
            found = scheduled.run(device, prompts, rules)
            is_same = found.texts == expected
            yield {"engine": kind, "ready_s": ready_s, "same_texts": is_same, "ends": found.ends}
            if not is_same and "dtype" in settings:
                raise RuntimeError(f"{kind}: texts are {found.texts}, the host's {expected}")

    def _find_ceilings(self, limit_s: float) -> Rows:
        self.ceilings = floor.measure(self._suite)
        yield self.ceilings

    def _engine(self, points: list[Point], limit_s: float) -> Rows:
        ends_s = time.monotonic() + limit_s
        for point in points:
            if time.monotonic() > ends_s:
                return
            yield engine_table.measure(self._engines, point, self.ceilings.get("read"))

    def _timeline(self, limit_s: float) -> Rows:
        self._engines.close()
        yield from timeline.measure(self._suite.device.type, limit_s)

    def _switches(self, limit_s: float) -> Rows:
        """Engines with and without early launches."""
        ends_s = time.monotonic() + limit_s
        few, *_, many = self._suite.batches
        for is_on in (True, False):
            self._engines.close()
            for num_rows in (few, many):
                if time.monotonic() > ends_s:
                    return
                with patch.object(switches, "DEPENDENT_LAUNCHES", is_on):
                    point = Point("graphs", num_rows)
                    row = engine_table.measure(self._engines, point, self.ceilings.get("read"))
                yield {"change": "none" if is_on else "no early launches"} | row
        self._engines.close()

    def _prompts(self, limit_s: float) -> Rows:
        yield from prompt_table.prefill(self._engines, self.ceilings.get("product_tflop_per_s"))

    def _mixed(self, limit_s: float) -> Rows:
        yield from prompt_table.mixed(self._engines)

    def _mesh(self, limit_s: float) -> Rows:
        self._engines.close()
        yield from mesh_table.measure(self._suite, self._engines.folder("model"), limit_s)

    def _stores(self, limit_s: float) -> Rows:
        self._engines.close()
        yield from store_table.measure(self._suite, self._engines.folder("model"), limit_s)

    def _ranks(self, limit_s: float) -> Rows:
        """The mesh on as many GPUs as the model's KV heads can be divided among."""
        num_ranks = self._suite.model["num_key_value_heads"]
        if self._suite.device.type == "cuda":
            num_cards = torch.cuda.device_count()
            num_ranks = min(num_ranks, 1 << num_cards.bit_length() - 1)
        if num_ranks == 1:
            raise LeftOut("there is one GPU, and ranks need several")
        self._engines.close()
        folder = self._engines.folder("model")
        for row in mesh_table.measure(self._suite, folder, limit_s, num_ranks):
            yield {"ranks": num_ranks} | row

    def _kernels(self, limit_s: float) -> Rows:
        self._engines.close()
        ends_s = time.monotonic() + limit_s
        yield from kernel_table.rows(self._suite, self.ceilings.get("read"), ends_s)

    def _start(self, limit_s: float) -> Rows:
        self._engines.close()
        yield from start.measure(self._engines.folder("mtp"), self._suite.device.type, limit_s)

    def _sweeps(self, limit_s: float) -> Rows:
        yield from kernel_table.sweeps(self._suite, time.monotonic() + limit_s)

    def _peers(self, limit_s: float) -> Rows:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # it would look for kernels online
        # Transformers takes seconds to import, and may be missing.
        from benchmarks.gpu.peers import Peer

        self._engines.close()
        ends_s = time.monotonic() + limit_s
        with as_torch_has_it():
            peer = Peer(self._suite, self._engines.folder("model"))
            for num_rows in self._suite.mesh_batches:
                if time.monotonic() > ends_s:
                    return
                yield peer.measure(num_rows)

    def _launches(self, limit_s: float) -> Rows:
        from benchmarks.gpu import launches  # Triton may be missing on a CPU

        yield from launches.measure(of_launches(), self._folder)


def marked_files() -> list[Path]:
    """Files with tests marked ``gpu``, operators before engines; other files may need libraries
    missing on a GPU machine."""
    folders = (ROOT / "tests" / name for name in ("kernels", "gpu"))
    return [path for folder in folders for path in sorted(folder.glob("test_*.py"))]


def run_tests(files: list[Path], limit_s: float) -> Rows:
    """Raises RuntimeError if a test fails, and subprocess.TimeoutExpired."""
    how = ["-m", "gpu", "-v", "--tb=short", "--durations=15"]
    how.append(f"--session-timeout={max(TOLD_S, limit_s - TOLD_S):.0f}")
    command = [sys.executable, "-m", "pytest", *how, *map(str, files)]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired as error:
        yield {"output": _last_lines(bytes(error.stdout or b"").decode())}
        raise
    else:
        yield {"exit code": done.returncode, "output": _last_lines(done.stdout + done.stderr)}
        if done.returncode:
            raise RuntimeError(f"pytest ended with {done.returncode}")


def _last_lines(text: str) -> list[str]:
    return text.splitlines()[-NUM_LINES_TOLD:]

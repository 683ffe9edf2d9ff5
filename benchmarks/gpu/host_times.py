"""Host time of each operator in a step with a prompt, by Triton's own launcher on a simulated GPU.
A real driver takes some microseconds more for a launch."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import product
from statistics import quantiles
from time import perf_counter_ns
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from triton.backends.nvidia.driver import CudaLauncher
from triton.runtime.jit import JITFunction

from benchmarks import report
from benchmarks.gpu.dry_card import launching
from benchmarks.gpu.shapes import LATENTS, QWEN3_8B, QWEN3_MOE, Config
from benchmarks.gpu.step_launches import mixed_step
from kernels.decode_inputs import decode_inputs
from services.worker.engine.device import segments

MAX_LEN = 4096
NUM_ROWS, PROMPT = 32, 30  # all GEMMs are Triton's
SMALL = {"vocab_size": 2048, "hidden_size": 512, "num_hidden_layers": 4}  # of no matter here
MODELS = {"dense": QWEN3_8B, "experts": QWEN3_MOE, "latents": LATENTS}
CPU = torch.device("cpu")
REPEATS, NUM_RUNS = 60, 5


class Clock:
    """Measures the outermost functions of ``kernels.*.triton``."""

    def __init__(self) -> None:
        # For each call: launches, time, and time in Triton.
        self.calls: dict[str, list[tuple[int, int, int]]] = defaultdict(list)
        self._is_running = False
        self._launches: list[int] = []

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            if self._is_running:
                return function(*arguments, **options)
            self._is_running, self._launches, started = True, [], perf_counter_ns()
            out = function(*arguments, **options)
            total = perf_counter_ns() - started
            self.calls[name].append((len(self._launches), total, sum(self._launches)))
            self._is_running = False
            return out

        return call

    def run(self, run: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        started = perf_counter_ns()
        run(*arguments, **options)
        self._launches.append(perf_counter_ns() - started)


@contextmanager
def timed(clock: Clock) -> Iterator[None]:
    """Within it ``clock`` runs."""
    run = JITFunction.run
    with ExitStack() as stack:
        for module in [each for name, each in sys.modules.items() if is_operator(name)]:
            for name, function in vars(module).items():
                if isinstance(function, FunctionType) and function.__module__ == module.__name__:
                    label = f"{module.__name__.split('.')[1]}.{name}"
                    stack.enter_context(patch.object(module, name, clock.timed(label, function)))
        stack.enter_context(
            patch.object(JITFunction, "run", lambda *given, **more: clock.run(run, *given, **more))
        )
        yield


def is_operator(module: str) -> bool:
    return module.startswith("kernels.") and module.endswith(".triton")


def times_of(config: Config) -> dict[str, Any]:
    """Of each operator: its calls in a step, and the launches and the time of a call."""
    step = mixed_step(config | SMALL, NUM_ROWS, [PROMPT], MAX_LEN, device=CPU)
    ids = patch.object(segments, "decode_inputs", _with_zeros(decode_inputs))
    clock = Clock()
    with torch.inference_mode(), launching(compiles=False) as card, ids:
        card.launcher_cls = CudaLauncher
        step()  # imports all operators
        with timed(clock):
            for _ in range(REPEATS):
                step()
    return {name: row_of(calls) for name, calls in clock.calls.items()}


def row_of(calls: list[tuple[int, int, int]]) -> dict[str, float]:
    """The time of a tenth of the calls is shorter: other processes slow down the rest."""
    launches, total, of_triton = (quantiles(column, n=10)[0] for column in zip(*calls, strict=True))
    us = {"us": total / 1000, "us of Triton": of_triton / 1000}
    return {"calls": len(calls) / REPEATS, "launches": launches} | us


def _with_zeros(operator: Callable[..., Any]) -> Callable[..., Any]:
    """torch's operators read these outputs."""

    def call(*arguments: Any) -> Any:
        outputs = operator(*arguments)
        for each in outputs:
            each.zero_()
        return outputs

    return call


def main(trees: list[str]) -> None:
    """Runs in turn with ``trees`` of other versions that have this file."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for _, tree in product(range(NUM_RUNS), ["", *trees]):
        command = [sys.executable, "-m", "benchmarks.gpu.host_times", "--once"]
        environment = os.environ | ({"PYTHONPATH": tree} if tree else {})
        done = subprocess.run(
            command, cwd=tree or None, env=environment, capture_output=True, check=True, text=True
        )
        found[f"tree {1 + trees.index(tree)}" if tree else "here"].append(json.loads(done.stdout))
    report.write("gpu.host_times", {tree: lowest(runs) for tree, runs in found.items()})


def lowest(runs: list[Any]) -> Any:
    """Of each number in ``runs``."""
    if isinstance(runs[0], dict):
        return {key: lowest([each[key] for each in runs]) for key in runs[0]}
    return round(min(runs), 1)


if __name__ == "__main__":
    if sys.argv[1:] == ["--once"]:
        print(json.dumps({name: times_of(config) for name, config in MODELS.items()}))
    else:
        main(sys.argv[1:])

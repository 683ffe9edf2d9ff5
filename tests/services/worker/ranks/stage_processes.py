"""Stages of a pipeline as processes: the first runs the scheduler's core, and lets all compute each
plan."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from benchmarks.harness.engines import KERNELS
from benchmarks.harness.ports import free_port
from benchmarks.harness.scheduled import Run, run
from services.worker.backends.native import NativeLM
from services.worker.engine.build import build_engine
from services.worker.engine.protocol import Engine, StepOutput
from services.worker.metrics import STAGE_STEPS, STAGE_STEPS_AHEAD
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import SamplingParams, StepPlan
from tests.preloaded import PRELOADED
from tests.services.worker.driver import model_of

TIMEOUT_S = 300

_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


def _unchanged(engine: Any) -> Any:
    return engine


@dataclass(frozen=True)
class Case:
    """A model, prompts, and ``options`` of ``drive``. Each stage has its engine as ``wrap`` gives
    it."""

    folder: Path
    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams] | SamplingParams
    kernels: str = "native"
    settings: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    drive: Callable[..., Run] = run
    wrap: Callable[[Any], Any] = _unchanged


@dataclass(frozen=True)
class Found:
    """The first stage's results, True if native code computed them, the number of steps, and the
    number begun while others were in flight."""

    run: Run
    is_native: bool
    num_steps: int
    num_ahead: int


class _Stages:
    """The first stage's engine, which forwards each plan to the others."""

    def __init__(self, engine: Engine, others: Sequence[Any]) -> None:
        self.capacity, self.additions = engine.capacity, engine.additions
        self._engine = engine
        self._others = others

    def submit(
        self,
        plan: StepPlan,
        ids: np.ndarray,
        output: Future[StepOutput],
        pixels: Sequence[Array] = (),
    ) -> None:
        for queue in self._others:
            queue.put((plan, ids))
        self._engine.submit(plan, ids, output, pixels)

    def reset(self) -> None:
        for queue in self._others:
            queue.put(None)
        self._engine.reset()


def run_alone(case: Case) -> Run:
    """By one process."""
    return case.drive(case.wrap(_engine(case)), case.prompts, case.params, **case.options)


def run_stages(
    cases: dict[str, Case], size: int, directory: Path, num_hosts: int = 1
) -> dict[str, Found]:
    """Hosts are simulated on the loopback interface."""
    hosts = {
        "pipeline_parallel_size": size,
        "nnodes": num_hosts,
        "master_addr": "127.0.0.1",
        "master_port": free_port(2),
        "insecure_tcp": True,
        "mesh_dir": directory,
    }
    plans = [_context.Queue() for _ in range(size - 1)]
    results = _context.Queue()
    processes = [
        _context.Process(
            target=_run_first if rank == 0 else _run_other,
            args=(
                list(cases.values()),
                {**hosts, "rank": rank, "node_rank": rank * num_hosts // size},
                plans if rank == 0 else plans[rank - 1],
                *([results] if rank == 0 else []),
            ),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    found = {name: results.get(timeout=TIMEOUT_S) for name in cases}
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, f"{process} did not end well"
    return found


def _engine(case: Case, **settings: Any) -> Any:
    torch.set_num_threads(1)
    defaults = {"dtype": "float32", "max_num_seqs": 24, "num_threads": 1, **KERNELS[case.kernels]}
    config = WorkerConfig(model=case.folder, device="cpu", **(defaults | settings | case.settings))
    return build_engine(config, lambda text, fraction: None)


def _run_first(
    cases: list[Case], settings: dict[str, Any], plans: Sequence[Any], results: Any
) -> None:
    for number, case in enumerate(cases):
        engine = _engine(case, **settings, leader=str(number))
        before = _counted()
        stages: Any = _Stages(case.wrap(engine), plans)
        done = case.drive(stages, case.prompts, case.params, **case.options)
        after = _counted()
        is_native = isinstance(model_of(engine), NativeLM)
        results.put(Found(done, is_native, after[0] - before[0], after[1] - before[1]))
        _leave()


def _run_other(cases: list[Case], settings: dict[str, Any], plans: Any) -> None:
    for number, case in enumerate(cases):
        engine = case.wrap(_engine(case, **settings, leader=str(number)))
        while (planned := plans.get(timeout=TIMEOUT_S)) is not None:
            engine.submit(*planned, Future())
        engine.reset()
        _leave()


def _counted() -> tuple[int, int]:
    each = (STAGE_STEPS, STAGE_STEPS_AHEAD)
    return tuple(int(counter._value.get()) for counter in each)  # type: ignore[return-value]


def _leave() -> None:
    if distributed.is_initialized():
        distributed.barrier()  # a stage stays while another still receives from it
        distributed.destroy_process_group()

"""An engine of two processes that share a model, as seen from the process of the scheduler."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness.engines import KERNELS
from services.worker.engine.build import build_engine
from services.worker.engine.protocol import StepOutput
from services.worker.media.addition import Media
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Capacity, StepPlan
from tests.preloaded import PRELOADED

SIZE = 2
SETTINGS = {"ranks": "tensor_parallel_size", "stages": "pipeline_parallel_size"}

_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)
_numbers = count()


class SharedEngine:
    """Sends each plan to both processes; the first one returns its result. Raises ConfigError."""

    additions = ()

    def __init__(
        self,
        folder: Path,
        kernels: str,
        settings: Mapping[str, Any],
        processes: str,
        directory: Path,
    ) -> None:
        given = {
            "model": folder,
            "device": "cpu",
            "max_num_seqs": 24,
            "num_threads": 1,
            **KERNELS[kernels],
            **settings,
            SETTINGS[processes]: SIZE,
            "leader": f"shared{next(_numbers)}",
            "mesh_dir": directory,
        }
        self._results = ThreadPoolExecutor(1)
        self.encoded: Any = _context.Queue()  # reports of the first one's encoder
        self._pipes: list[Connection] = []
        self._processes = [self._start(given, rank) for rank in range(SIZE)]
        answer = self._pipes[0].recv()
        if isinstance(answer, ConfigError):
            self.kill()
            raise answer
        self.capacity: Capacity = answer

    def _start(self, given: dict[str, Any], rank: int) -> Any:
        ours, theirs = _context.Pipe()
        reports = None if rank else self.encoded
        process = _context.Process(target=_run, args=(given, rank, theirs, reports), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process ends the pipe
        self._pipes.append(ours)
        return process

    def submit(
        self, plan: StepPlan, ids: np.ndarray, output: Future[StepOutput], pixels: list[np.ndarray]
    ) -> None:
        for rank, pipe in enumerate(self._pipes):
            pipe.send((plan, ids, [] if rank else pixels))
        self._results.submit(self._receive, output)

    def reset(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._results.shutdown()

    def _receive(self, output: Future[StepOutput]) -> None:
        try:
            output.set_result(self._pipes[0].recv())
        except EOFError as error:
            output.set_exception(error)


def _run(given: dict[str, Any], rank: int, pipe: Connection, encoded: Any) -> None:
    torch.set_num_threads(1)
    try:
        engine = build_engine(WorkerConfig(**given, rank=rank), lambda text, fraction: None)
    except ConfigError as error:
        pipe.send(error)
        return
    for each in engine.additions:
        if isinstance(each, Media) and rank == 0:
            each.encoder.on_encoded = lambda *about: encoded.put(about)
    pipe.send(engine.capacity)
    while True:
        message = pipe.recv()
        if message is None:
            engine.reset()
            continue
        output: Future[StepOutput] = Future()
        if rank == 0:
            output.add_done_callback(lambda done: pipe.send(done.result()))
        plan, ids, pixels = message
        engine.submit(plan, ids, output, pixels)

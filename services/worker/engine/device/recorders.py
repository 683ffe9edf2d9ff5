"""What records a function, so that it can be run again with one call of the host."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from services.worker.engine.device.out_of_memory import REMEDIES
from services.worker.engine.device.steps import Run
from services.worker.layers.parallel import Parallel
from services.worker.machine.hardware import why_out_of_memory
from shared.errors import ConfigError


class CaptureError(Exception):
    """What ran by itself cannot be captured, and this is why."""


class CpuRecorder:
    """Runs functions where there are no graphs."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, run: Run) -> Run:
        run()
        self.num_recorded += 1
        return run


class CudaRecorder:
    """Captures functions as graphs that share their memory: they run one after the other. Ranks
    capture the same functions, and have the same graphs."""

    def __init__(self, device: torch.device, parallel: Parallel) -> None:
        self.num_recorded = 0
        self._parallel = parallel
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Runs it before: kernels are compiled then, and libraries get their memory. And after, so
        that the tensors that the next capture reads are filled."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._run(run)
            self._stream.synchronize()
            with on_all_ranks(self._parallel):
                self._capture(graph, run)
            graph.replay()
        torch.cuda.current_stream().wait_stream(self._stream)
        self.num_recorded += 1
        return graph.replay

    def _run(self, run: Run) -> None:
        """Raises ConfigError where it finds no memory and other ranks wait for this one."""
        try:
            run()
        except torch.OutOfMemoryError as error:
            if self._parallel.size == 1:
                raise
            raise ConfigError(
                "gpu-memory-utilization: what is to be a graph finds no memory on a rank, and the"
                f" others wait for it: {why_out_of_memory(error)}; {REMEDIES}"
            ) from error

    def _capture(self, graph: torch.cuda.CUDAGraph, run: Run) -> None:
        """Raises CaptureError."""
        try:
            self._run_captured(graph, run)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise CaptureError(str(error).partition("\n")[0]) from error

    def _run_captured(self, graph: torch.cuda.CUDAGraph, run: Run) -> None:
        """What other threads do meanwhile does not end it."""
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to raise
                graph.capture_end()
            raise
        graph.capture_end()


@contextmanager
def on_all_ranks(parallel: Parallel) -> Iterator[None]:
    """Within, ranks do nothing together. Where one of them finds no memory, all of them raise
    torch.OutOfMemoryError at the end."""
    problem = None
    try:
        yield
    except torch.OutOfMemoryError as error:
        problem = error
    all_have_room = parallel.least(int(problem is None))
    if problem is not None:
        raise problem
    if not all_have_room:
        raise torch.OutOfMemoryError("another rank has no memory for it")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """An old engine that is found then would free its graphs and memory inside a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

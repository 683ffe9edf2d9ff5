"""Recorders of a function: the host repeats it with one call."""

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
    """The reason why a function that runs eagerly cannot be captured."""


class CpuRecorder:
    """Repeats functions on a CPU, without graphs."""

    def __init__(self) -> None:
        self.num_recorded = 0

    def __call__(self, run: Run) -> Run:
        run()
        self.num_recorded += 1
        return run


class CudaRecorder:
    """Captures functions as graphs that share memory, because they run one after the other. All
    ranks capture the same functions and have the same graphs."""

    def __init__(self, device: torch.device, parallel: Parallel) -> None:
        self.num_recorded = 0
        self._parallel = parallel
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)

    def __call__(self, run: Run) -> Run:
        """Runs the function before the capture, to compile kernels and give libraries their memory.
        Replays it after the capture, to fill the tensors that the next capture reads."""
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
        """Raises ConfigError if memory runs out while other ranks wait for this one."""
        try:
            run()
        except torch.OutOfMemoryError as error:
            if self._parallel.size == 1:
                raise
            raise ConfigError(
                "gpu-memory-utilization: a rank has no memory for a CUDA graph, and the other ranks"
                f" wait for it: {why_out_of_memory(error)}; {REMEDIES}"
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
        """CUDA calls of other threads do not end the capture."""
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
    """If one rank runs out of memory in the block, all ranks raise torch.OutOfMemoryError at its
    end. The block must have no collective operation."""
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
    """The collection of an old engine would free its graphs and memory inside a capture."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()

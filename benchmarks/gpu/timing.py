"""Device time of operations, without the host's launch overhead."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

Run = Callable[[], object]
NUM_REPLAYS = 10
WARM_UP_S = 0.2  # an idle GPU has to raise its clocks first
MIN_RUNS = 20  # in a graph, to amortise its launch of a few microseconds


def seconds(runs: Sequence[Run], device: torch.device) -> float:
    """The median time of one of ``runs``, which do the same on other memory, one after another in a
    CUDA graph, so that only the device's work counts."""
    with torch.inference_mode():
        if device.type != "cuda":
            return median(_by_the_clock(run) for run in runs)
        num_times = -(-MIN_RUNS // len(runs))
        replay = _captured(runs, num_times, device)
        _warm_up(replay)
        times_s = [_by_events(replay) for _ in range(NUM_REPLAYS)]
        return median(times_s) / (num_times * len(runs))


def _captured(runs: Sequence[Run], num_times: int, device: torch.device) -> Run:
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs:  # compiles kernels and allocates libraries' memory
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in [*runs] * num_times:
            run()
    return graph.replay


def _warm_up(replay: Run) -> None:
    ends_s = time.perf_counter() + WARM_UP_S
    while time.perf_counter() < ends_s:
        _by_events(replay)


def _by_events(run: Run) -> float:
    begins, ends = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begins.record()
    run()
    ends.record()
    ends.synchronize()
    return begins.elapsed_time(ends) / 1e3


def _by_the_clock(run: Run) -> float:
    run()
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s

"""An engine's use of GPU memory, and its behaviour when that is short."""

import gc
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.step_engine import run_step
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.device.measure import SLACK_SHARE
from shared.wire.messages import Admit, Decode, Prefill, SamplingParams, StepPlan
from tests.gpu.engines import make_cuda_engine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1") != "1",
        reason="other tests take memory of the GPU meanwhile",
    ),
]
BUDGET_BYTES = 4 << 30  # too little for all slots to be full
MAX_LEN = 2048
NUM_BUILDS = 20
BUILD_BYTES = 1 << 20  # below any graph or state of an engine; drivers round up
PARAMS = SamplingParams(seed=1, temperature=0.8, ignore_eos=True, max_tokens=40)


def long_prompts(num: int, length: int) -> list[list[int]]:
    return np.random.default_rng(0).integers(300, 8000, (num, length)).tolist()


def test_the_largest_steps_fit_the_memory_limit() -> None:
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    budget = total - free + BUDGET_BYTES + int(total * SLACK_SHARE)
    engine = make_cuda_engine(
        gpu_memory_utilization=budget / total, max_num_seqs=1024, max_num_batched_tokens=8192
    )
    capacity = engine.capacity
    num_wanted = capacity.max_num_seqs * -(-capacity.max_model_len // capacity.block_size)
    assert capacity.num_blocks < num_wanted, "the budget limits the cache"
    scheduled.run(engine, long_prompts(8, MAX_LEN - 50), PARAMS)
    scheduled.run(engine, long_prompts(1024, 8), PARAMS)
    torch.cuda.synchronize()
    left, _ = torch.cuda.mem_get_info()
    assert total - left <= budget


def test_engines_that_are_dropped_leave_nothing() -> None:
    """Twenty of them with graphs. The first ones load kernels. cuBLAS workspaces, which are per
    stream and so per graph, are freed."""
    allocated, used = [], []
    for _ in range(NUM_BUILDS):
        engine = make_cuda_engine(
            cudagraph_capture_sizes=[1, 4], num_gpu_blocks_override=600, max_model_len=MAX_LEN
        )
        scheduled.run(engine, long_prompts(4, 20), PARAMS)
        del engine
        gc.collect()
        torch.cuda.synchronize()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        allocated.append(torch.cuda.memory_allocated())
        used.append(total - free)
    assert allocated[2:] == [allocated[2]] * (NUM_BUILDS - 2)
    assert max(used[2:]) - used[2] < (NUM_BUILDS - 3) * BUILD_BYTES, used


@pytest.fixture
def fill_card() -> Iterator[Callable[[], None]]:
    """Leaves torch almost no memory until the test ends."""

    def fill() -> None:
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        room = torch.cuda.memory_reserved() + (16 << 20)
        torch.cuda.set_per_process_memory_fraction(room / total)

    yield fill
    torch.cuda.set_per_process_memory_fraction(1.0)


def admit(engine: DeviceEngine, slot: int, num_ids: int) -> Admit:
    num_blocks = engine.capacity.max_model_len // engine.capacity.block_size
    blocks = list(range(slot * num_blocks, (slot + 1) * num_blocks))
    return Admit(slot, f"r{slot}", 1, 0, 0, num_ids, num_ids, 0, PARAMS, blocks)


def test_prompts_that_find_no_memory_fail_and_rows_that_decode_go_on(
    fill_card: Callable[[], None],
) -> None:
    engine = make_cuda_engine(max_model_len=MAX_LEN, max_num_batched_tokens=8192)
    first = admit(engine, 0, 10)
    ids = np.arange(300, 310, dtype=np.int32)
    run_step(engine, StepPlan(1, [], [first], [], [Prefill(0, 10)], []), ids)
    fill_card()
    length = 2000
    admits = [admit(engine, slot, length) for slot in range(1, 5)]
    rows = [Prefill(slot, length) for slot in range(1, 5)]
    ids = np.concatenate(long_prompts(4, length)).astype(np.int32)
    result, _ = run_step(engine, StepPlan(2, [], admits, [], rows, [Decode(0)]), ids)
    by_slot = {row.slot: row for row in result.rows}
    assert by_slot[0].run.num_tokens == 1
    for slot in range(1, 5):
        assert "memory does not suffice" in str(by_slot[slot].error)
    result, _ = run_step(engine, StepPlan(3, [], [], [], [], [Decode(0)]), np.zeros(0, np.int32))
    assert [(row.slot, row.run.num_tokens) for row in result.rows] == [(0, 1)]

"""A store of KV blocks next to a GPU: blocks and states keep their bits, sequences go on from them,
and steps launched ahead change nothing. Needs a GPU: `pytest -m gpu`."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.pieces import pack
from kernels.pieces.layout import pieces_of
from services.worker.stores.device_copies import CudaStreams
from services.worker.stores.device_part import DevicePart
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import Admit, Prefill, Save, StepPlan
from tests.gpu.engines import drafting, make_cuda_engine
from tests.mesh.test_device_stores import DRAFTS, go_on
from tests.services.worker.device.test_device_states import save
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.test_device import decoding
from tests.services.worker.stores.worker import GREEDY, StoreWorker, key_of

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]
STEPS: dict[str, dict[str, Any]] = {
    "graphs": {"cudagraph_mode": "full"},
    "eager": {"enforce_eager": True},
    "8 bits": {"kv_cache_dtype": "int8"},
}
NUM_BLOCKS, NUM_FULL = 8, 5  # of 16 tokens
IDS, OTHERS = random_ids(90, 8000), random_ids(90, 8000, seed=1)


def started(folder: Path, model: Path = EMBEDDED_MODEL, **settings: Any) -> StoreWorker:
    """``settings`` for a GPU, with its blocks of 16 tokens."""

    def make(model: Path, kernels: str, **settings: Any) -> Any:
        return make_cuda_engine(model, **settings)

    return StoreWorker(model, folder, "device", make, **settings)


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_successor_goes_on_with_the_bits_of_its_predecessor(
    steps: dict[str, Any], depth: int, tmp_path: Path
) -> None:
    settings = {"speculative_config": drafting(depth), **steps}
    first = started(tmp_path, **settings)
    assert isinstance(first.part, DevicePart)
    blocks = list(range(NUM_BLOCKS))
    text = first.generate(IDS, blocks, depth=depth)
    assert first.save(blocks[:NUM_FULL]).unsaved == []
    saved = [first.bytes_of(each) for each in blocks[:NUM_FULL]]
    assert len({*saved}) == NUM_FULL
    store = first.store
    first.close()
    second = started(tmp_path, **settings)
    assert second.store == store
    others = list(range(20, 20 + NUM_BLOCKS))
    assert second.load(others[:NUM_FULL]).lost == []
    assert [second.bytes_of(each) for each in others[:NUM_FULL]] == saved
    assert second.generate(IDS, others, num_cached=16 * NUM_FULL, depth=depth) == text
    second.close()


@pytest.mark.parametrize("steps", [STEPS["graphs"], STEPS["eager"]], ids=["graphs", "eager"])
def test_blocks_are_saved_as_they_were_before_their_next_owner(
    steps: dict[str, Any], tmp_path: Path
) -> None:
    """Many steps are launched before the first result is waited for."""
    worker = started(tmp_path, **steps)
    blocks = list(range(NUM_BLOCKS))
    for turn in range(5):
        text = worker.generate(IDS, blocks)
        before = [worker.bytes_of(each) for each in range(NUM_FULL)]
        row = Admit(0, "other", 1, 0, 0, len(OTHERS), len(OTHERS), 0, GREEDY, blocks)
        rows: list[Any] = [Save(key_of(each), each, each) for each in range(NUM_FULL)]
        step = 1000 * (turn + 1)
        plans = [
            (
                StepPlan(step, [], [row], [], [Prefill(0, len(OTHERS))], [], 0, rows=rows),
                np.array(OTHERS, np.int32),
            ),
            *((decoding(step + 1 + each), np.zeros(0, np.int32)) for each in range(8)),
            (StepPlan(step + 10, [0], [], [], [], [], 0), np.zeros(0, np.int32)),
        ]
        outputs = []
        for plan, ids in plans:
            outputs.append(Future[Any]())
            worker.engine.submit(plan, ids, outputs[-1])
        for output in outputs:
            output.result()
        assert not {*before} & {worker.bytes_of(each) for each in range(NUM_FULL)}
        others = list(range(20, 20 + NUM_BLOCKS))
        assert worker.load(others[:NUM_FULL]).lost == []
        assert [worker.bytes_of(each) for each in others[:NUM_FULL]] == before
        assert worker.generate(IDS, others, num_cached=16 * NUM_FULL) == text
    worker.close()


@pytest.mark.parametrize("steps", [STEPS["graphs"], STEPS["eager"]], ids=["graphs", "eager"])
def test_a_successor_goes_on_from_the_state_of_its_predecessor(
    steps: dict[str, Any], tmp_path: Path
) -> None:
    save(tmp_path / "model", "Qwen3.5")
    ids = random_ids(100, 150)  # their state is copied behind 64
    first = started(tmp_path / "kv", tmp_path / "model", **steps)
    text = first.generate(ids, list(range(8)), state=1)
    first.save([0, 1, 2, 3])
    assert first.save_state(1).unsaved == []
    state = first.bytes_of_state(1)
    first.close()
    second = started(tmp_path / "kv", tmp_path / "model", **steps)
    blocks = list(range(20, 28))
    second.admit(ids, blocks, num_cached=64, state=0)
    assert second.load(blocks[:4]).lost == []
    assert second.load_state(0, slot=0).lost == []
    assert second.bytes_of_state(0) == state
    assert second.finish(len(ids) - 64) == text
    second.close()


def test_copies_wait_for_steps_and_steps_for_copies() -> None:
    """A long launch comes before each copy, and a change of its source after it."""
    device = torch.device("cuda")
    streams, num = CudaStreams(device), 1 << 22
    memory = torch.zeros(4, num, dtype=torch.uint8, device=device)
    pieces = pieces_of([memory])
    rows = torch.tensor([2], device=device)
    packed = pieces.packed(1, torch.empty(num, dtype=torch.uint8, device=device))
    host = torch.empty(num, dtype=torch.uint8, pin_memory=True)
    for value in range(1, 6):
        torch.cuda._sleep(50_000_000)
        memory[2] = value
        pack(pieces, rows, packed)
        wait = streams.download(packed.flatten().view(torch.uint8), host)
        memory[2] = 99
        wait()
        assert (host == value).all()
        up = torch.full((num,), value, dtype=torch.uint8).pin_memory()
        streams.upload(up, memory[1])
        copied = memory[1].clone()
        streams.mark()()
        assert (copied == value).all()


async def test_streams_of_a_killed_worker_go_on_from_the_saved_bytes(tmp_path: Path) -> None:
    on_cuda = {"DEVICE": "cuda", "KV_CACHE_MEMORY_BYTES": str(256 << 20)}
    await go_on(tmp_path, "services.worker", SPECULATIVE_CONFIG=DRAFTS, **on_cuda)

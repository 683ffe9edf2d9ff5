"""Layers with a state, and short convolutions, in the engine for GPUs: after hits, preemption and
drafts, and in graphs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Lfm2ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels.paged_attention import DecodeRows
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.device.states import DeviceStatePool
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import Capacity, SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import (
    MAX_POSITIONS,
    VOCAB_SIZE,
    random_prompts,
    save_model,
)
from tests.services.worker.device.test_device_groups import STEPS
from tests.services.worker.hybrids import HYBRIDS, save_hybrid
from tests.services.worker.test_families import LFM
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint
from tests.services.worker.test_state_pool import SPEC, admit, plan

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU = torch.device("cpu")
COMMON: dict[str, Any] = {
    "max_model_len": MAX_POSITIONS,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 6,
    "block_size": 4,
}


def save(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    if name == "LFM2":
        save_model(folder, Lfm2ForCausalLM, **LFM)
    elif name in HYBRIDS:
        save_hybrid(folder, name)
    else:
        Checkpoint(HYBRID_FAMILIES[name], folder)


def prompts() -> list[list[int]]:
    """Two of three begin with the same 70 ids."""
    rng = np.random.default_rng(4)
    beginning = rng.integers(8, VOCAB_SIZE, 70).tolist()
    return [
        (beginning if num % 3 else []) + rng.integers(8, VOCAB_SIZE, 5 + 4 * (num % 4)).tolist()
        for num in range(9)
    ]


@pytest.mark.parametrize(
    ("name", "method", "steps"),
    [
        ("LFM2", "none", "graphs"),
        pytest.param("Qwen3.5", "none", "eager", marks=pytest.mark.slow),
        pytest.param("Qwen3-Next", "mtp", "graphs", marks=pytest.mark.slow),
        pytest.param("granite 4, tied", "ngram", "graphs", marks=pytest.mark.slow),
        pytest.param("Qwen3-Next", "mtp", "eager", marks=pytest.mark.slow),
        pytest.param("Qwen3-Next", "none", "graphs", marks=pytest.mark.slow),
        pytest.param("Qwen3.5", "mtp", "eager", marks=pytest.mark.slow),
        pytest.param("Qwen3.5", "ngram", "graphs", marks=pytest.mark.slow),
    ],
)
def test_texts_with_few_blocks_are_the_host_engines_with_all(
    tmp_path: Path, name: str, method: str, steps: str
) -> None:
    save(tmp_path, name)
    speculation = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    common = {**COMMON, "speculative_config": speculation}
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=20) for seed in range(9)]
    host = make_engine(tmp_path, **common)
    blocks = {"num_gpu_blocks_override": 3 * most_blocks(host.capacity, MAX_POSITIONS) // 2}
    engine = make_engine(tmp_path, "device", **blocks, **common, **STEPS[steps])
    found = scheduled.run(engine, prompts(), params, caches_prefixes=True)
    assert found.texts == scheduled.run(host, prompts(), params).texts
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    assert (found.num_accepted > 0) == (method == "mtp")


@pytest.mark.parametrize("steps", only([("graphs",)], STEPS))
def test_a_forward_pass_that_is_repeated_changes_nothing(
    tmp_path: Path, steps: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after prompts without memory: layers have advanced the states of decode rows already."""
    torch.manual_seed(0)
    Checkpoint(HYBRID_FAMILIES["Qwen3-Next"], tmp_path)
    speculation = {"method": "mtp", "num_speculative_tokens": 3, "adaptive": False}
    engine = make_engine(tmp_path, "device", speculative_config=speculation, **STEPS[steps])
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(5)]
    expected = scheduled.run(engine, random_prompts(5), params)
    forward = DeviceEngine._try_forward

    def twice(self: DeviceEngine, step: Any) -> None:
        forward(self, step)
        if not step.rows.has_chunks:
            forward(self, step)

    monkeypatch.setattr(DeviceEngine, "_try_forward", twice)
    found = scheduled.run(engine, random_prompts(5), params)
    assert found.texts == expected.texts
    assert found.num_accepted == expected.num_accepted > 0


CAPACITY = Capacity(num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=512,
                    max_model_len=1024, num_speculative_tokens=3, num_states=3)  # fmt: skip


def test_a_slot_begins_with_zeros_or_with_a_copy() -> None:
    pool = DeviceStatePool([SPEC, SPEC], CAPACITY, CPU)
    for layer in pool.layers:
        layer.matrices[:4], layer.columns[:4] = 7, 7
        layer.matrices[5], layer.columns[5] = 128, 3
    pool.apply(plan(admits=(admit(1, 128, start=1), admit(2, to=0))))
    for layer in pool.layers:
        assert (layer.matrices[1] == 128).all()
        assert (layer.columns[1] == 3).all()
        assert not layer.matrices[2].any()
        assert not layer.columns[2].any()
        assert (layer.matrices[3] == 7).all()
    slots = torch.arange(2, dtype=torch.int32)
    rows = DecodeRows(1, slots, slots, slots)
    states = pool.of_step(rows, slots, None, 2)
    assert states is not None
    assert [each[1] for each in states.positions] == [128, 128]
    assert states.rows.copies.tolist() == [-1, -1, 4, -1, -1]
    with pytest.raises(ValueError, match="slot 3 begins with 64 ids without a state"):
        pool.apply(plan(admits=(admit(3, 64),)))


def test_all_slots_of_a_trial_share_a_state() -> None:
    pool = DeviceStatePool([SPEC], CAPACITY, CPU, is_trial=True)
    assert len({layer.matrices[slot].data_ptr() for layer in pool.layers for slot in range(4)}) == 1


def test_fewer_sequences_than_asked_have_graphs_of_their_number(tmp_path: Path) -> None:
    """States take half of the cache's memory."""
    save_hybrid(tmp_path, "qwen3.5")
    settings = {"max_num_seqs": 24, "kv_cache_memory_bytes": 1 << 20}
    engine = make_engine(tmp_path, "device", max_model_len=128, **settings)
    assert 1 < engine.capacity.max_num_seqs < 24
    params = [SamplingParams(seed=seed, max_tokens=5) for seed in range(8)]
    found = scheduled.run(engine, random_prompts(8), params)
    host = make_engine(tmp_path, max_model_len=128, max_num_seqs=4)
    assert found.texts == scheduled.run(host, random_prompts(8), params).texts

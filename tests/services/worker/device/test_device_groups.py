"""Groups of layers in the engine for GPUs: sequences give back the blocks behind windows."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import save_mimo
from tests.services.worker.foreign_checkpoints import save_family

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

MAX_LEN = 300
DRAFTS = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "GptOssForCausalLM": {},
    "Gemma3ForCausalLM": {},
    "MiMoForCausalLM": {"speculative_config": DRAFTS},
}
STEPS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"cudagraph_mode": "full", "cudagraph_capture_sizes": [2, 7, 48]},
}


def save(folder: Path, name: str) -> None:
    if name == "MiMoForCausalLM":
        windows = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}
        save_mimo(folder, max_position_embeddings=MAX_LEN, **windows)
    else:
        save_family(folder, name, max_position_embeddings=MAX_LEN)


def prompts() -> list[list[int]]:
    """Two of three begin with the same 130 ids."""
    rng = np.random.default_rng(4)
    beginning = rng.integers(8, 160, 130).tolist()
    return [
        (beginning if num % 3 else []) + rng.integers(8, 160, 20 + 30 * (num % 4)).tolist()
        for num in range(9)
    ]


@pytest.mark.parametrize(
    ("name", "steps"),
    only([("Gemma3ForCausalLM", "eager")], SETTINGS, STEPS),
)
def test_texts_with_few_blocks_are_the_host_engines_with_all(
    tmp_path: Path, name: str, steps: str
) -> None:
    save(tmp_path, name)
    common = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 48, **SETTINGS[name]}
    params = [SamplingParams(seed=seed, max_tokens=45, ignore_eos=True) for seed in range(9)]
    host = make_engine(tmp_path, **common)
    num_blocks = 3 * most_blocks(host.capacity, MAX_LEN) // 2
    engine = make_engine(
        tmp_path, "device", num_gpu_blocks_override=num_blocks, **common, **STEPS[steps]
    )
    found = scheduled.run(engine, prompts(), params, caches_prefixes=True)
    assert found.texts == scheduled.run(host, prompts(), params).texts
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    has_window = [group.window is not None for group in engine.capacity.groups]
    assert (engine._slots._num_dropped.sum(1) > 0).tolist() == has_window == sorted(has_window)
    assert set(has_window) == {False, True}

"""Groups of layers on a CUDA device: blocks behind windows go to other sequences, and texts stay
the same. Needs a GPU: `pytest -m gpu`."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import SamplingParams
from tests.gpu.engines import make_cuda_engine
from tests.services.worker.device.test_device_groups import MAX_LEN, SETTINGS, STEPS, prompts, save

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("name", SETTINGS)
def test_texts_with_few_blocks_match_runs_with_all_and_the_cpu(
    tmp_path: Path, name: str, steps: dict[str, Any]
) -> None:
    save(tmp_path, name)
    common = {"max_model_len": MAX_LEN, "max_num_batched_tokens": 48, **SETTINGS[name]}
    params = [SamplingParams(seed=seed, max_tokens=60, ignore_eos=True) for seed in range(9)]
    roomy = make_cuda_engine(tmp_path, **common, **steps)
    num_blocks = 3 * most_blocks(roomy.capacity, MAX_LEN) // 2
    scarce = make_cuda_engine(tmp_path, num_gpu_blocks_override=num_blocks, **common, **steps)
    found = scheduled.run(scarce, prompts(), params, caches_prefixes=True)
    assert found.num_readmitted > 0
    assert scarce._slots._num_dropped.any()
    assert found.texts == scheduled.run(roomy, prompts(), params).texts
    assert found.texts == scheduled.run(make_engine(tmp_path, **common), prompts(), params).texts

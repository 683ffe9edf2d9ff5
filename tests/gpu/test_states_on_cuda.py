"""Layers with a state, and short convolutions, on a CUDA device: texts are the CPU's after hits,
preemption and drafts. Needs a GPU: `pytest -m gpu`."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import SamplingParams
from tests.gpu.engines import drafting, make_cuda_engine
from tests.services.worker.checkpoints import MAX_POSITIONS
from tests.services.worker.device.test_device_groups import STEPS
from tests.services.worker.device.test_device_states import COMMON, prompts, save
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(
    ("name", "depth"), [("LFM2", 0), *product(HYBRID_FAMILIES, (0, 2))], ids=str
)
def test_texts_are_the_cpus(tmp_path: Path, name: str, depth: int, steps: dict[str, Any]) -> None:
    save(tmp_path, name)
    common = {**COMMON, "speculative_config": drafting(depth)}
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=30) for seed in range(9)]
    host = make_engine(tmp_path, **common)
    blocks = {"num_gpu_blocks_override": 3 * most_blocks(host.capacity, MAX_POSITIONS) // 2}
    engine = make_cuda_engine(tmp_path, **blocks, **common, **steps)
    found = scheduled.run(engine, prompts(), params, caches_prefixes=True)
    assert found.texts == scheduled.run(host, prompts(), params).texts
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    assert (found.num_accepted > 0) == (depth > 0)

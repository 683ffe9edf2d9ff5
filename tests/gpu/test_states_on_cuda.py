"""Layers with a state, and short convolutions, on a CUDA device: texts are the CPU's after hits,
preemption and drafts. Needs a GPU: `pytest -m gpu`."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Lfm2ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from shared.wire.messages import SamplingParams
from tests.gpu.engines import drafting, make_cuda_engine
from tests.services.worker.checkpoints import save_model
from tests.services.worker.test_device_groups import STEPS
from tests.services.worker.test_device_states import BLOCKS, COMMON, prompts
from tests.services.worker.test_families import LFM
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_texts_of_layers_with_a_state_are_the_cpus(
    tmp_path: Path, name: str, depth: int, steps: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    Checkpoint(HYBRID_FAMILIES[name], tmp_path)
    check(tmp_path, depth, steps)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_texts_of_short_convolutions_are_the_cpus(tmp_path: Path, steps: dict[str, Any]) -> None:
    save_model(tmp_path, Lfm2ForCausalLM, **LFM)
    check(tmp_path, 0, steps)


def check(folder: Path, depth: int, steps: dict[str, Any]) -> None:
    common = {**COMMON, "speculative_config": drafting(depth)}
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=30) for seed in range(9)]
    engine = make_cuda_engine(folder, **BLOCKS, **common, **steps)
    found = scheduled.run(engine, prompts(), params, caches_prefixes=True)
    assert found.texts == scheduled.run(make_engine(folder, **common), prompts(), params).texts
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    assert (found.num_accepted > 0) == (depth > 0)

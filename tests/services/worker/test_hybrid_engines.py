"""Engines with models of layers with a state: drafts, hits and preemption change nothing."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from services.worker.backends.native import NativeLM
from shared.wire.kv_groups import most_blocks
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import MAX_POSITIONS, VOCAB_SIZE, random_prompts
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint


def with_head(folder: Path, name: str) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    return Checkpoint(HYBRID_FAMILIES[name], folder).folder


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_with_drafts_texts_match_runs_without(tmp_path: Path, name: str, kernels: str) -> None:
    """At a high temperature even drafts of a random head are often accepted."""
    folder = with_head(tmp_path / "head", name)
    params = [SamplingParams(seed=seed, temperature=6.0, max_tokens=12) for seed in range(8)]
    texts = []
    for method in ("mtp", "ngram", "none"):
        speculation = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
        engine = make_engine(folder, kernels, speculative_config=speculation)
        found = scheduled.run(engine, random_prompts(8), params)
        assert (found.num_accepted > 0) == (method == "mtp")
        texts.append(found.texts)
    assert texts[0] == texts[1] == texts[2]


def prompts() -> list[list[int]]:
    """Two of three begin with the same 70 ids."""
    rng = np.random.default_rng(4)
    beginning = rng.integers(8, VOCAB_SIZE, 70).tolist()
    return [
        (beginning if num % 3 else []) + rng.integers(8, VOCAB_SIZE, 5 + 4 * (num % 4)).tolist()
        for num in range(9)
    ]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3-next",
        "granite 4, tied",
        pytest.param("granite 4, experts, biases of other GEMMs", marks=pytest.mark.slow),
        pytest.param("nemotron 3, latents", marks=pytest.mark.slow),
        pytest.param("kimi", marks=pytest.mark.slow),
        pytest.param("ling 2.5", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("method", ["none", "ngram"])
def test_hits_and_preemption_change_no_bit(tmp_path: Path, name: str, method: str) -> None:
    """Of native code: texts with few blocks and prefix hits are those of engines with all blocks,
    alone and with others."""
    save_hybrid(tmp_path, name)
    compare_with_few_blocks(tmp_path, method)


@pytest.mark.parametrize(
    "name",
    [pytest.param("Nemotron 3", marks=pytest.mark.slow), "Nemotron 3, latents"],
)
def test_hits_and_preemption_change_no_bit_with_drafts_of_a_head(tmp_path: Path, name: str) -> None:
    assert compare_with_few_blocks(with_head(tmp_path / "head", name), "mtp") > 0


def compare_with_few_blocks(folder: Path, method: str) -> int:
    """Returns the number of accepted drafts."""
    speculation = {"method": method, "num_speculative_tokens": 2, "adaptive": False}
    common: dict[str, Any] = {
        "max_model_len": MAX_POSITIONS,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 6,
        "block_size": 16,
        "speculative_config": speculation,
    }
    params = [
        SamplingParams(seed=seed, temperature=6.0, max_tokens=30, logprobs=1) for seed in range(9)
    ]
    engine = make_engine(folder, "native", **common)
    assert isinstance(engine._model, NativeLM)
    expected = scheduled.run(engine, prompts(), params)
    blocks = {"num_gpu_blocks_override": 3 * most_blocks(engine.capacity, MAX_POSITIONS) // 2}
    few = make_engine(folder, "native", **blocks, **common)
    found = scheduled.run(few, prompts(), params, caches_prefixes=True)
    assert found.num_hits > 0
    assert found.num_readmitted > 0
    alone = scheduled.run(engine, prompts(), params, max_open=1)
    for other in (found, alone):
        assert other.texts == expected.texts
        for own, others in zip(other.logprobs, expected.logprobs, strict=True):
            assert np.array_equal(own, others, equal_nan=True)
    return found.num_accepted

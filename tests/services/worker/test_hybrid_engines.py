"""Engines with models of gated delta layers: drafts change nothing."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import random_prompts
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint


def with_head(folder: Path, name: str) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    return Checkpoint(HYBRID_FAMILIES[name], folder).folder


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("name", HYBRID_FAMILIES)
def test_with_drafts_texts_are_those_without(tmp_path: Path, name: str, kernels: str) -> None:
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

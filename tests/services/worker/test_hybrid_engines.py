"""Engines with models of gated delta layers: ranks, stages and drafts change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from shared.wire.messages import SamplingParams
from tests.services.worker import stages
from tests.services.worker.checkpoints import random_prompts
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.ranks import Case, texts_of_ranks
from tests.services.worker.test_mtp_families import HYBRID_FAMILIES, Checkpoint
from tests.services.worker.test_ranks import WIDE, assert_same
from tests.services.worker.test_stages import assert_same as assert_same_stages
from tests.services.worker.test_stages import case

DRAFTS = {"speculative_config": {"method": "mtp", "adaptive": False}}
CALM = {"initializer_range": 0.1}  # layers that do not magnify rounding
ALTERNATE = ["linear_attention", "full_attention"] * 2  # each of two stages has both


def saved(folder: Path, name: str, **changes: Any) -> Path:
    folder.mkdir()
    save_hybrid(folder, name, **changes)
    return folder


def with_head(folder: Path, name: str) -> Path:
    folder.mkdir()
    torch.manual_seed(0)
    return Checkpoint(HYBRID_FAMILIES[name], folder).folder


@pytest.mark.slow
def test_ranks_have_the_texts_of_one_process(tmp_path: Path) -> None:
    cases = {
        "qwen3.5": Case(saved(tmp_path / "dense", "qwen3.5", **CALM)),
        "qwen3.5 moe": Case(saved(tmp_path / "moe", "qwen3.5 moe", **CALM)),
        "qwen3-next": Case(saved(tmp_path / "next", "qwen3-next", **CALM)),
        "qwen3-next, codes": Case(tmp_path / "next", settings={"quantization": "wint8"}),
        "qwen3-next, drafts": Case(with_head(tmp_path / "head", "Qwen3-Next"), settings=DRAFTS),
        "qwen3.5, native": Case(saved(tmp_path / "wide", "qwen3.5", **CALM, **WIDE), "native"),
        "qwen3-next, native": Case(
            saved(tmp_path / "wide-next", "qwen3-next", **CALM, **WIDE), "native"
        ),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


def test_stages_have_the_texts_of_one_process(tmp_path: Path) -> None:
    next_types = {"layer_types": ALTERNATE, **CALM}
    cases = {
        "qwen3.5": case(saved(tmp_path / "dense", "qwen3.5", num_hidden_layers=8, **CALM)),
        "qwen3-next": case(saved(tmp_path / "next", "qwen3-next", **next_types)),
    }
    found = stages.run_stages(cases, 2, tmp_path)
    assert_same_stages(found, cases)


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

"""Engines with models of layers with a state: ranks and stages change nothing."""

from pathlib import Path
from typing import Any

import pytest

from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.ranks import stage_processes
from tests.services.worker.ranks.rank_processes import Case, texts_of_ranks
from tests.services.worker.ranks.test_ranks import WIDE, assert_same
from tests.services.worker.ranks.test_stages import assert_same as assert_same_stages
from tests.services.worker.ranks.test_stages import case
from tests.services.worker.test_hybrid_engines import with_head

DRAFTS = {"speculative_config": {"method": "mtp", "adaptive": False}}
CALM = {"initializer_range": 0.1}  # layers that do not magnify rounding
NEMOTRON = ["linear_attention", "full_attention", "moe"] * 2
ALTERNATE = ["linear_attention", "full_attention"] * 2  # each of two stages has both


def saved(folder: Path, name: str, **changes: Any) -> Path:
    folder.mkdir()
    save_hybrid(folder, name, **changes)
    return folder


@pytest.mark.slow
def test_ranks_have_the_texts_of_one_process(tmp_path: Path) -> None:
    groups = saved(
        tmp_path / "groups", "granite 4, rope, two groups", shared_intermediate_size=64, **CALM
    )
    cases = {
        "qwen3.5": Case(saved(tmp_path / "dense", "qwen3.5", **CALM)),
        "qwen3.5 moe": Case(saved(tmp_path / "moe", "qwen3.5 moe", **CALM)),
        "qwen3-next": Case(saved(tmp_path / "next", "qwen3-next", **CALM)),
        "qwen3-next, codes": Case(tmp_path / "next", settings={"quantization": "wint8"}),
        "qwen3-next, drafts": Case(with_head(tmp_path / "head", "Qwen3-Next"), settings=DRAFTS),
        "qwen3.5, native": Case(saved(tmp_path / "wide", "qwen3.5", **CALM, **WIDE), "native"),
        "granite 4": Case(groups),
        "granite 4, native": Case(groups, "native"),
        "qwen3-next, native": Case(
            saved(tmp_path / "wide-next", "qwen3-next", **CALM, **WIDE), "native"
        ),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
def test_stages_have_the_texts_of_one_process(tmp_path: Path) -> None:
    next_types = {"layer_types": ALTERNATE, **CALM}
    cases = {
        "qwen3.5": case(saved(tmp_path / "dense", "qwen3.5", num_hidden_layers=8, **CALM)),
        "qwen3-next": case(saved(tmp_path / "next", "qwen3-next", **next_types)),
        "granite 4": case(saved(tmp_path / "mamba", "granite 4, tied", **next_types)),
        "kimi": case(saved(tmp_path / "kimi", "kimi", **next_types)),
        "ling 2.5": case(saved(tmp_path / "ling", "ling 2.5", **CALM)),
        "nemotron 3": case(
            saved(tmp_path / "nemotron", "nemotron 3", layers_block_type=NEMOTRON, **CALM)
        ),
    }
    found = stage_processes.run_stages(cases, 2, tmp_path)
    assert_same_stages(found, cases)

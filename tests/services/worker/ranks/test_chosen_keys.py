"""Ranks and stages of a model with indexed attention choose the keys of one process."""

from pathlib import Path

import pytest
from transformers import DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM

from tests.services.worker.ranks import test_ranks, test_stages
from tests.services.worker.ranks.rank_processes import Case, texts_of_ranks
from tests.services.worker.test_families import CASES

pytestmark = pytest.mark.slow
V32 = DeepseekV32ForCausalLM, CASES["deepseek v3.2, yarn"][1]
GLM5 = GlmMoeDsaForCausalLM, CASES["glm 5, shared choices, biases"][1]


def test_ranks_have_the_texts_of_one_process(tmp_path: Path) -> None:
    v32 = test_ranks.save(tmp_path / "v32", V32[0], **V32[1])
    glm = test_ranks.save(tmp_path / "glm", GLM5[0], **GLM5[1])
    cases = {"torch": Case(v32), "native": Case(v32, "native"), "shared": Case(glm, "native")}
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    test_ranks.assert_same(found, cases)


def test_stages_have_the_bits_of_one_process(tmp_path: Path) -> None:
    v32 = test_stages.save(tmp_path / "v32", V32[0], **V32[1])
    glm = test_stages.save(tmp_path / "glm", GLM5[0], **GLM5[1])
    cases = {
        "own": test_stages.case(v32, **test_stages.SHORT_STEPS),
        "shared": test_stages.case(glm),
    }
    test_stages.assert_same(test_stages.run_stages(cases, 2, tmp_path), cases)

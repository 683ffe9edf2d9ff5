"""Pooled prompts of stages."""

from pathlib import Path

from transformers import GraniteForCausalLM

from shared.wire.messages import Pooling, SamplingParams
from tests.services.worker.ranks.stage_processes import run_stages
from tests.services.worker.ranks.test_ranks import save
from tests.services.worker.ranks.test_stages import SHORT_STEPS, assert_same, case

POOLED = SamplingParams(seed=0, max_tokens=0, pooling=Pooling("mean"))


def test_pooled_prompts_of_stages_have_the_bits_of_one_process(tmp_path: Path) -> None:
    granite = save(tmp_path / "granite", GraniteForCausalLM, tie_word_embeddings=True)
    cases = {"pooled": case(granite, POOLED, runner="pooling", **SHORT_STEPS)}
    found = run_stages(cases, 3, tmp_path)
    assert_same(found, cases)
    assert found["pooled"].is_native

"""Ranks of the engine for GPUs, here on CPUs, give the results of one process."""

from pathlib import Path

import pytest
from transformers import GraniteForCausalLM, Olmo2ForCausalLM

from tests.services.worker.device.short_of_memory import short_of_memory
from tests.services.worker.ranks.rank_processes import Case, texts_of_ranks
from tests.services.worker.ranks.test_ranks import (
    SOME_DRAFTS,
    WHOLE,
    assert_same,
    save,
    save_odd_experts,
    save_with_head,
)

IN_BLOCKS = {"embedding_quantization": "fp8_block", "lm_head_quantization": "fp8_block"}


def test_two_ranks_have_the_texts_of_one_process(tmp_path: Path) -> None:
    """Some drafts of an MTP head, and experts in parts."""
    mimo, oss = save_with_head(tmp_path / "mimo"), save_odd_experts(tmp_path / "oss")
    cases = {
        "mimo, some drafts": Case(mimo, "device", SOME_DRAFTS),
        "gpt-oss": Case(oss, "device"),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
def test_two_ranks_have_the_texts_of_one_process_in_more_forms(tmp_path: Path) -> None:
    """Embeddings in blocks, norms over all heads, and whole experts."""
    mimo, oss = save_with_head(tmp_path / "mimo"), save_odd_experts(tmp_path / "oss")
    cases = {
        "mimo": Case(mimo, "device", IN_BLOCKS),
        "olmo 2": Case(save(tmp_path / "olmo", Olmo2ForCausalLM), "device"),
        "gpt-oss, whole": Case(oss, "device", WHOLE),
    }
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)


@pytest.mark.slow
def test_a_graph_that_one_rank_has_no_memory_for_is_on_none(tmp_path: Path) -> None:
    """Three sequences would be padded to four only on the ranks that have it."""
    folder = save(tmp_path / "granite", GraniteForCausalLM, intermediate_size=128)
    sizes = {"cudagraph_capture_sizes": [2, 4]}
    cases = {"device": Case(folder, "device", sizes, prepare=short_of_memory)}
    with texts_of_ranks(cases, 2, tmp_path) as found:
        pass
    assert_same(found, cases)

"""Drafts by EAGLE-3 heads are those of plain torch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
    Qwen3MoeForCausalLM,
)

from benchmarks.harness import scheduled
from benchmarks.harness.engines import ENGINES, make_engine
from shared.wire.messages import SamplingParams
from tests.services.worker.checkpoints import VOCAB_SIZE, random_prompts, save_model
from tests.services.worker.eagle.checkpoints import (
    HIDDEN,
    PlainEagle,
    change_tensors,
    save_head,
)
from tests.services.worker.speculation import iter_positions

GREEDY = SamplingParams(seed=0, temperature=0.0, max_tokens=10, logprobs=0, draft_logprobs=True)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[type[PreTrainedModel], dict[str, Any]] = {
    LlamaForCausalLM: {},
    Qwen2ForCausalLM: {"tie_word_embeddings": True},
    Qwen3ForCausalLM: {"head_dim": 16},
    Qwen3MoeForCausalLM: EXPERTS,
}


def eagle(head: Path, **more: Any) -> dict[str, Any]:
    return {
        "method": "eagle3",
        "model": str(head),
        "num_speculative_tokens": 3,
        "adaptive": False,
    } | more


def check_drafts(model: Path, head: Path, kernels: str, tapped: list[int]) -> None:
    engine = make_engine(model, kernels, speculative_config=eagle(head))
    plain, prompts, num_seen = PlainEagle(model, head, tapped), random_prompts(4), 0
    done = scheduled.run(engine, prompts, GREEDY)
    for index, prompt in enumerate(prompts):
        positions = iter_positions(done.verified[index])
        for (_, part), position in zip(done.drafts[index], positions, strict=True):
            ids, drafts = prompt + done.texts[index][:position], part.ids.tolist()
            logits = plain.draft_logits(ids, drafts[:-1])
            places = range(len(drafts))
            assert (logits.amax(1) - logits[places, drafts]).max() < 1e-3
            logprobs = torch.log_softmax(logits, -1)[places, drafts]
            np.testing.assert_allclose(part.values, logprobs, atol=2e-3)
            num_seen += len(drafts)
    assert num_seen > 60


@pytest.mark.parametrize("kernels", ENGINES)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.__name__)
def test_drafts_match_plain_torch(
    tmp_path: Path, family: type[PreTrainedModel], kernels: str
) -> None:
    """The default layers of a trunk of seven are 2, 3 and 4."""
    save_model(tmp_path, family, num_hidden_layers=7, **FAMILIES[family])
    save_head(tmp_path / "head")
    check_drafts(tmp_path, tmp_path / "head", kernels, [2, 3, 4])


@pytest.mark.parametrize(
    ("layout", "changes", "tapped"),
    [
        ("speculators", {}, [0, 1, 2]),  # the default layers of a trunk of three
        ("speculators", {"eagle_aux_hidden_state_layer_ids": [4, 0, 1]}, [0, 1, 4]),
        ("speculators", {"norm_before_residual": False, "norm_before_fc": True}, [0, 1, 2]),
        ("speculators", {"norm_output": True, "draft_vocab_size": None}, [0, 1, 2]),
        (
            "authors",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
            [1, 2, 4],
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_layouts_and_options(
    tmp_path: Path, layout: str, changes: dict[str, Any], tapped: list[int], kernels: str
) -> None:
    num_layers = 3 if tapped == [0, 1, 2] else 5
    save_model(tmp_path, LlamaForCausalLM, num_hidden_layers=num_layers)
    save_head(tmp_path / "head", layout=layout, **changes)
    check_drafts(tmp_path, tmp_path / "head", kernels, tapped)


@pytest.mark.parametrize("kernels", ["native", "torch"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_embeddings_and_output_head_are_the_folders_own_or_the_models(
    tmp_path: Path, kernels: str, is_tied: bool
) -> None:
    """Native code keeps tied embeddings in the output head."""
    save_model(tmp_path, LlamaForCausalLM, tie_word_embeddings=is_tied)
    save_head(tmp_path / "own")
    change_tensors(tmp_path / "own", embed_tokens__weight=torch.randn(VOCAB_SIZE, HIDDEN))
    check_drafts(tmp_path, tmp_path / "own", kernels, [0, 1, 2])
    save_head(tmp_path / "models", draft_vocab_size=None)
    change_tensors(tmp_path / "models", lm_head__weight=None)
    check_drafts(tmp_path, tmp_path / "models", kernels, [0, 1, 2])


def test_a_head_may_have_the_models_quantization(tmp_path: Path) -> None:
    save_model(tmp_path, LlamaForCausalLM)
    save_head(tmp_path / "head")
    texts = []
    for speculation in (eagle(tmp_path / "head"), {"method": "none"}):
        settings = {"quantization": "wint8", "speculative_config": speculation}
        engine = make_engine(tmp_path, "native", **settings)
        texts.append(scheduled.run(engine, random_prompts(4), GREEDY).texts)
    assert texts[0] == texts[1]

"""Ling 2.5 and Ring-linear 2.0: drafts, decays and limits of native code."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.engines import KERNELS, make_engine
from services.worker.backends.head_limits import check_delta
from services.worker.hybrids.lightning import Lightning, LightningSpec, log_rates
from services.worker.layers.ops import NotSupported
from tests.services.worker.checkpoints import (
    VOCAB_SIZE,
    assert_greedy,
    change_config,
    random_prompts,
    save_model,
)
from tests.services.worker.driver import Driver, Job, assert_drafts_change_no_text
from tests.services.worker.hybrids import HYBRIDS, Sequences, load, save_hybrid
from tests.services.worker.ling import SIZES, BailingMoeV2ForCausalLM

LING, RING = "ling 2.5", "ring-linear 2"
WITH_HEAD = {"num_nextn_predict_layers": 1}


@pytest.mark.parametrize("name", [LING, RING])
def test_drafts_match_the_published_code(tmp_path: Path, name: str) -> None:
    save_hybrid(tmp_path, name, **WITH_HEAD)
    family: Any = HYBRIDS[name][0]
    ids = np.random.default_rng(5).integers(8, VOCAB_SIZE, 23).tolist()
    drafts = [9, 31, 80]
    found = Sequences(load(tmp_path), 1).draft_logits(ids, drafts)
    expected = family.from_pretrained(tmp_path).draft_logits(ids, drafts)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kernels", KERNELS)
def test_without_lightning_layers_texts_and_drafts_match_the_published_code(
    tmp_path: Path, kernels: str
) -> None:
    shape = SIZES | WITH_HEAD | {"layer_group_size": 1}
    save_model(tmp_path, BailingMoeV2ForCausalLM, **shape)
    oracle: Any = BailingMoeV2ForCausalLM.from_pretrained(tmp_path)
    change_config(tmp_path, layer_group_size=None, group_norm_size=None)  # as published
    prompts = random_prompts(4)
    speculation = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    engine = make_engine(tmp_path, kernels, speculative_config=speculation)
    texts = Driver(engine, [3, 7, 1, 5]).run([Job(prompt) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        assert_greedy(oracle, prompt, text)
    drafts = Sequences(load(tmp_path), 1).draft_logits(prompts[2], [9, 31])
    expected = oracle.draft_logits(prompts[2], [9, 31])
    torch.testing.assert_close(drafts, expected, atol=1e-4, rtol=1e-4)


def test_with_drafts_texts_match_runs_without(tmp_path: Path) -> None:
    save_hybrid(tmp_path, LING, **WITH_HEAD)
    assert_drafts_change_no_text(tmp_path, "native", 3)


def test_decays_match_the_published_code() -> None:
    """Of the second of twenty layers, with heads of two geometric sequences."""
    rates = [math.exp(each) for each in log_rates(LightningSpec(6, 16, 1, 20), 1)]
    expected = [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]
    assert rates == pytest.approx([each * (1 + 1e-5) for each in expected])


def test_heads_that_native_code_cannot_compute_are_refused(tmp_path: Path) -> None:
    save_hybrid(tmp_path, RING, head_dim=24)
    layer, *_ = load(tmp_path).state_layers()
    assert isinstance(layer, Lightning)
    with pytest.raises(NotSupported, match="state 0: head_dim 24 is no multiple of 16"):
        check_delta(layer.rule)

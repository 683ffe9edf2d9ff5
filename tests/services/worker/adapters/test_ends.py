"""Adapters of embeddings and output heads: texts of the checkpoints that PEFT merges."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import GraniteForCausalLM, Qwen2ForCausalLM

from benchmarks.harness.engines import make_engine
from services.worker.backends.native import NativeLM
from tests.services.worker.adapters.made import texts_of
from tests.services.worker.adapters.peft_adapters import Written, tensors_of, write_random
from tests.services.worker.adapters.test_experts import digests_of, engine_of
from tests.services.worker.adapters.test_texts import (
    assert_different,
    assert_near,
    assert_rows,
    assert_same,
)
from tests.services.worker.checkpoints import change_config, random_prompts, save_model
from tests.services.worker.driver import model_of
from tests.services.worker.test_families import CASES

FAMILIES = {
    "untied": (Qwen2ForCausalLM, {}),
    "tied, factors": (GraniteForCausalLM, CASES["granite, tied, biases"][1]),
    "soft caps": CASES["gemma 2"],
}
TARGETS = (["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head", "q_proj", "down_proj"])

RANKS = (4, 17, 8)
SCALES = [3 / rank for rank in RANKS]


def save(name: str, folder: Path, **changes: Any) -> Path:
    family, own = FAMILIES[name]
    save_model(folder / "base", family, "10MB", **own, **changes)
    return folder / "base"


def some_adapters(base: Path, target: Path) -> list[Written]:
    return [
        write_random(base, target / f"{i}", i, r=r, lora_alpha=3, target_modules=targets)
        for i, (targets, r) in enumerate(zip(TARGETS, RANKS, strict=True))
    ]


def untie(base: Path, written: Written, scale: float) -> Path:
    """The merged checkpoint with an embedding and a head of their own: PEFT has one for both."""
    changes = tensors_of(written.adapter)
    own, file = load_file(base / "model.safetensors"), written.merged / "model.safetensors"
    table = own["model.embed_tokens.weight"]
    ends = {
        "model.embed_tokens": (table, "lora_embedding_B", "lora_embedding_A"),
        "lm_head": (own.get("lm_head.weight", table), "lora_B.weight", "lora_A.weight"),
    }
    merged = {}
    for layer, (weight, *parts) in ends.items():
        factors = [changes.get(f"base_model.model.{layer}.{part}") for part in parts]
        left, right = (weight.new_zeros(1, 1) if each is None else each for each in factors)
        delta = scale * (left @ right)
        merged[f"{layer}.weight"] = weight + (delta if layer == "lm_head" else delta.T)
    save_file(load_file(file) | merged, file, {"format": "pt"})
    change_config(written.merged, tie_word_embeddings=False)
    return written.merged


@pytest.mark.parametrize("name", FAMILIES)
def test_texts_match_merged_weights(name: str, tmp_path: Path) -> None:
    base = save(name, tmp_path)
    written, prompts = some_adapters(base, tmp_path), random_prompts(4)
    merged = [untie(base, *each) for each in zip(written, SCALES, strict=True)]
    for kernels in ("native", "torch"):
        engine = engine_of(base, kernels, written)
        assert isinstance(model_of(engine), NativeLM) == (kernels == "native")
        digests = [*digests_of(engine), ""]
        found = texts_of(engine, prompts, digests, chunk_sizes=(3, 7, 20))
        for number, each in enumerate(merged):
            own = slice(number, number + 1)
            assert_near(found[own], texts_of(make_engine(each, kernels), prompts[own], [""]))
        plain = texts_of(make_engine(base, kernels), prompts, [""] * 4)
        assert_near(found[3:], plain[3:])
        assert_different(found[:3], plain[:3])
        if kernels == "native":
            assert_same(found[3:], plain[3:])
            assert_rows(engine, texts_of(engine, prompts, digests), prompts, digests)

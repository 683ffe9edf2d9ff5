"""Texts with adapters: those of merged weights, the same bits in any batch, and without effect on
rows without adapters."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from benchmarks.harness.engines import make_engine
from services.worker.adapters.sites import LoadedAdapter
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from tests.selection import only
from tests.services.worker.adapters.made import (
    DIGESTS,
    Text,
    engine_with,
    make_adapter,
    merge,
    shapes_of,
    texts_of,
)
from tests.services.worker.checkpoints import random_prompts, save_model, save_qwen2
from tests.services.worker.driver import model_of
from tests.services.worker.hybrids import HYBRIDS
from tests.services.worker.stored_codes import LAYOUTS, save_quantized
from tests.services.worker.test_families import CASES
from tests.services.worker.test_rounded import some_builds_round

FAMILIES: dict[str, tuple[type[PreTrainedModel], dict[str, Any]]] = {
    **{
        name: CASES[name]
        for name in (
            "llama, no groups, biases",
            "granite, tied, biases",
            "olmo 2",
            "gpt-oss",
            "qwen2 moe",
            "deepseek v3, yarn",
        )
    },
    "qwen3.5": HYBRIDS["qwen3.5"],
    "qwen3-next": HYBRIDS["qwen3-next"],
    "granite 4": HYBRIDS["granite 4, tied"],
}
FEW = ("granite, tied, biases", "qwen2 moe", "deepseek v3, yarn", "gpt-oss", "qwen3.5")
TOLERANCE = 1e-4  # of logprobs, in float32
VALUES = ("v_proj", "kv_a_proj_with_mqa")
KINDS = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj", "in_proj", "out_proj", "a_proj")


@pytest.fixture(
    scope="module",
    params=[
        name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES
    ],
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    save_model(folder, family, "10MB", **changes)
    return folder


def some_of(folder: Path, dtype: torch.dtype = torch.float32) -> list[LoadedAdapter]:
    """One that changes all layers, and others with some of them."""
    shapes = shapes_of(folder)
    return [
        make_adapter(shapes, DIGESTS[0], 8, dtype),
        make_adapter(shapes, DIGESTS[1], 1, dtype, keeps=lambda name: name.endswith(VALUES)),
        make_adapter(shapes, DIGESTS[2], 16, dtype, keeps=lambda name: name.endswith(KINDS)),
        make_adapter(shapes, DIGESTS[3], 33, dtype, keeps=lambda name: "layers.1." in name),
    ]


def assert_same(found: list[Text], wanted: list[Text]) -> None:
    for (ids, logprobs), (other_ids, others) in zip(found, wanted, strict=True):
        assert ids == other_ids
        assert logprobs.tobytes() == others.tobytes()


def assert_near(found: list[Text], wanted: list[Text], tolerance: float = TOLERANCE) -> None:
    for (ids, logprobs), (other_ids, others) in zip(found, wanted, strict=True):
        assert ids == other_ids
        np.testing.assert_allclose(logprobs, others, atol=tolerance, rtol=0)


def assert_different(found: list[Text], others: list[Text]) -> None:
    for (_, logprobs), (_, other) in zip(found, others, strict=True):
        assert np.abs(logprobs[0] - other[0]).max() > 0.05


@pytest.fixture(scope="module")
def merged(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints, each with another adapter."""
    target = tmp_path_factory.mktemp("merged")
    return [merge(folder, target / each.digest, each) for each in some_of(folder)]


@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_texts_match_merged_weights(folder: Path, merged: list[Path], kernels: str) -> None:
    adapters, prompts = some_of(folder), random_prompts(5)
    engine = engine_with(folder, kernels, adapters)
    assert isinstance(model_of(engine), NativeLM if kernels == "native" else TorchLM)
    digests = [each.digest for each in adapters]
    found = texts_of(engine, prompts, [*digests, ""])
    for number, each in enumerate(merged):
        own = slice(number, number + 1)
        assert_near(found[own], texts_of(make_engine(each, kernels), prompts[own], [""]))
    plain = texts_of(make_engine(folder, kernels), prompts, [""] * 5)
    assert_same(found[4:], plain[4:])
    assert_different(found[:4], plain[:4])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def test_native_rows_have_the_same_bits_in_any_batch(folder: Path, dtype: str) -> None:
    adapters, prompts = some_of(folder, getattr(torch, dtype)), random_prompts(10, seed=3)
    engine = engine_with(folder, "native", adapters, dtype=dtype)
    digests = [*(each.digest for each in adapters), ""] * 2
    whole = texts_of(engine, prompts, digests, chunk_sizes=(3, 7, 1, 20))
    for number in (*range(5), 9):
        own = slice(number, number + 1)
        assert_same(texts_of(engine, prompts[own], digests[own], seed=number), whole[own])
    mixed = [digests[number] for number in (3, 4, 0, 0, 2)]
    alone = texts_of(engine, prompts[:5], mixed, chunk_sizes=(11,))
    others = make_engine(folder, "native", dtype=dtype)
    assert_same(alone[1:2], texts_of(others, prompts[1:2], [""]))
    assert_same(alone[2:3], texts_of(engine, prompts[2:3], mixed[2:3]))


FORMS = ("wint8", "wint4", "fp8_block", "nf4")
# Forms that take operands in 8 bits.
WHOLE = (
    pytest.param("wint8", marks=some_builds_round("wint8")),
    *("wint4", "gptq, desc_act"),
)


def save_in(form: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint, and settings."""
    save_qwen2(folder / "dense", "10MB", hidden_size=128, intermediate_size=256)
    if form in FORMS:
        return folder / "dense", {"quantization": form}
    save_quantized(folder / "dense", folder / "codes", LAYOUTS[form])
    return folder / "codes", {}


@pytest.mark.parametrize(
    "form", only([("wint8",), ("fp8_block",), ("gptq, desc_act",)], [*FORMS, "gptq, desc_act"])
)
def test_quantized_weights(tmp_path: Path, form: str) -> None:
    """A is multiplied with the inputs in their own order, by native code as by torch."""
    folder, settings = save_in(form, tmp_path)
    adapters, prompts = some_of(folder), random_prompts(5)
    digests = [*(each.digest for each in adapters), ""]
    torchs = texts_of(engine_with(folder, "torch", adapters, **settings), prompts, digests)
    found = texts_of(engine_with(folder, "native", adapters, **settings), prompts, digests)
    assert_near(found, torchs)
    assert_rows(engine_with(folder, "native", adapters, **settings), found, prompts, digests)


@pytest.mark.parametrize("form", WHOLE)
def test_operands_in_8_bits(tmp_path: Path, form: str) -> None:
    folder, settings = save_in(form, tmp_path)
    adapters, prompts = some_of(folder), random_prompts(5)
    digests = [*(each.digest for each in adapters), ""]
    engine = engine_with(folder, "native", adapters, **settings, activation_dtype="int8")
    assert_rows(engine, texts_of(engine, prompts, digests), prompts, digests)


def assert_rows(
    engine: Any, found: list[Text], prompts: list[list[int]], digests: list[str]
) -> None:
    """Each of ``found`` is the text alone; all but the last have adapters with effects."""
    alone = [texts_of(engine, [prompt], [digests[i]])[0] for i, prompt in enumerate(prompts)]
    assert_same(found, alone)
    plain = texts_of(engine, prompts, [""] * len(prompts))
    assert_same(found[-1:], plain[-1:])
    assert_different(found[:-1], plain[:-1])

"""Texts with adapters by the engine for GPUs, here with torch's operators."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.engines import make_engine
from services.worker.adapters.device_ops import BankForm
from services.worker.adapters.table import NONE
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.adapters.made import engine_with, texts_of
from tests.services.worker.adapters.test_texts import (
    FAMILIES,
    assert_different,
    assert_near,
    assert_same,
    some_of,
)
from tests.services.worker.checkpoints import random_prompts, save_mimo, save_model, save_qwen2

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

FULL: dict[str, Any] = {"cudagraph_mode": "full", "cudagraph_capture_sizes": [1, 4, 16]}


@pytest.fixture(
    scope="module",
    params=only(
        [("granite, tied, biases",)],
        ["granite, tied, biases", "qwen2 moe", "deepseek v3, yarn", "qwen3.5"],
    ),
)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, changes = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("family")
    save_model(folder, family, "10MB", **changes)
    return folder


def test_texts_match_the_engine_on_the_host(folder: Path) -> None:
    """With graphs of steps and of prompts, and with chunks next to decode rows."""
    adapters, prompts = some_of(folder), random_prompts(5)
    digests = [*(each.digest for each in adapters), ""]
    engine = engine_with(folder, "device", adapters, **FULL)
    found = texts_of(engine, prompts, digests, chunk_sizes=(3, 7, 20))
    assert_near(found, texts_of(engine_with(folder, "torch", adapters), prompts, digests))
    plain = texts_of(engine, prompts, [""] * 5, chunk_sizes=(3, 7, 20))
    assert_different(found[:4], plain[:4])
    others = make_engine(folder, "device", **FULL)
    assert_same(plain, texts_of(others, prompts, [""] * 5, chunk_sizes=(3, 7, 20)))


def test_an_adapter_takes_the_place_of_another(tmp_path: Path) -> None:
    save_qwen2(tmp_path)
    adapters, prompts = some_of(tmp_path)[:2], random_prompts(2)
    engine = engine_with(tmp_path, "device", adapters, max_loras=1, **FULL)
    wanted = engine_with(tmp_path, "torch", adapters, max_loras=1)
    for adapter in (*adapters, adapters[0]):
        digests = [adapter.digest] * 2
        assert_near(texts_of(engine, prompts, digests), texts_of(wanted, prompts, digests))


def test_an_engine_may_have_fewer_slots_than_the_settings() -> None:
    limits: dict[str, Any] = {"max_adapters": 2, "max_rank": 4, "dtype": torch.float32}
    form = BankForm([], 4, device=torch.device("cpu"), **limits)
    form.assign(np.array([NONE, 1]))
    assert form.of_slots.tolist() == [NONE, 1, NONE, NONE, NONE]
    form.assign(np.array([0, NONE]))
    assert form.of_slots.tolist() == [0, NONE, NONE, NONE, NONE]


@pytest.mark.slow
def test_drafts_change_no_text(tmp_path: Path) -> None:
    """Decode rows have several tokens; the MTP head has no adapters."""
    save_mimo(tmp_path)
    adapters, prompts = some_of(tmp_path), random_prompts(5)
    digests = [*(each.digest for each in adapters), ""]
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=12, logprobs=0)
    drafting = {"method": "mtp", "num_speculative_tokens": 2}
    engine = engine_with(tmp_path, "device", adapters, speculative_config=drafting, **FULL)
    assert engine.capacity.num_speculative_tokens == 2
    found = texts_of(engine, prompts, digests, params)
    wanted = texts_of(engine_with(tmp_path, "torch", adapters), prompts, digests, params)
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]

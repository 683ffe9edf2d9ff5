"""Windows, softcaps and sinks in native attention, for every variant this CPU can run."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.library import load_library
from kernels.cpu.packing import NativeLibrary
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from services.worker.layers.context import current_context
from services.worker.layers.heads import AttentionSpec
from services.worker.models import CausalLM, parts
from services.worker.models.decoder import DecoderLM
from tests.services.worker.builds import each_variant
from tests.services.worker.test_native import furthest, make_config, make_model, random_prompts, run

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

FLOAT32, WINDOW = torch.float32, 200  # begins and ends within splits of the keys
each_dtype = pytest.mark.parametrize("dtype", [FLOAT32, torch.bfloat16], ids=str)
each_cache = pytest.mark.parametrize(
    "codes",
    [None, torch.int8, pytest.param(torch.uint8, marks=pytest.mark.slow)],
    ids=str,
)
SHAPE: Any = {"head_size": 64, "num_kv_heads": 2}  # eight queries per key
CONFIG = msgspec.structs.replace(make_config("Llama, sixteen queries a key"), **SHAPE)


@pytest.fixture(autouse=True)
def _options(monkeypatch: pytest.MonkeyPatch) -> None:
    """All options in a layer, with no window in every other layer."""

    def make(**values: Any) -> AttentionSpec:
        made.append(True)
        window = WINDOW if len(made) % 2 else None
        return AttentionSpec(**(values | {"window": window, "softcap": 2.0, "has_sinks": True}))

    made: list[bool] = []
    monkeypatch.setattr(parts, "AttentionSpec", make)


def model_of(dtype: torch.dtype) -> DecoderLM:
    return make_model(CONFIG, dtype)


def native(dtype: torch.dtype, variant: str) -> NativeLM:
    return NativeLM(model_of(dtype), 16, NativeLibrary(load_library(variant), dtype, 2))


@each_cache
@each_variant
def test_float32_logits_match_torch(variant: str, codes: torch.dtype | None) -> None:
    """Except for elements halfway between two codes."""
    some = random_prompts(1, 17, 130, 700)
    expected = run(TorchLM(model_of(FLOAT32)), CONFIG, FLOAT32, some, 300, codes=codes)
    found = run(native(FLOAT32, variant), CONFIG, FLOAT32, some, 300, codes=codes)
    assert furthest(found, expected, Tensor.mean) < 5e-5
    assert furthest(found, expected) < (1e-4 if codes is None else 5e-3)


@each_variant
def test_bfloat16_logits_are_nearer_to_float32_than_torchs(variant: str) -> None:
    some, dtype = random_prompts(1, 17, 400), torch.bfloat16
    exact = run(TorchLM(model_of(dtype).float()), CONFIG, FLOAT32, some, 300)
    torchs = run(TorchLM(model_of(dtype)), CONFIG, dtype, some, 300)
    found = run(native(dtype, variant), CONFIG, dtype, some, 300)
    assert furthest(found, exact, Tensor.mean) < furthest(torchs, exact, Tensor.mean)


@each_cache
@each_dtype
@each_variant
def test_a_tokens_logits_are_the_same_bits_whatever_shares_its_step(
    variant: str, dtype: torch.dtype, codes: torch.dtype | None
) -> None:
    some, model = random_prompts(300, 35, 1, 9), native(dtype, variant)
    expected = run(model, CONFIG, dtype, some, 1000, codes=codes)
    for chunk_size in (1, 16, 270):
        found = run(model, CONFIG, dtype, some, chunk_size, codes=codes)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size
    (alone,) = run(model, CONFIG, dtype, some[:1], 13, codes=codes)
    assert torch.equal(alone, expected[0])


class Spoilt(CausalLM):
    """In a window's layer, blocks before every visible key are NaN."""

    clears_blocks = False

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self._model = model

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        context, nan = current_context(), float("nan")
        batch: Any = context.groups[0].attention
        first_seen = batch.num_keys - np.diff(batch.token_starts) + 1 - WINDOW
        for row, first in enumerate(first_seen.tolist()):
            num_behind = max(0, first // 64) * 64 // 16  # keys are read in groups of this size
            blocks = torch.from_numpy(batch.block_tables[row, :num_behind])
            cache = context.kv_caches[0]
            (cache.entries if cache.scales is None else cache.scales)[blocks] = nan
        return self._model(input_ids, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


@each_cache
@each_variant
def test_keys_behind_a_window_are_not_read(variant: str, codes: torch.dtype | None) -> None:
    some, model = random_prompts(700, 300, 90), native(FLOAT32, variant)
    expected = run(model, CONFIG, FLOAT32, some, 130, codes=codes)
    found = run(Spoilt(model), CONFIG, FLOAT32, some, 130, codes=codes)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

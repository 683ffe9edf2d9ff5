"""Deltas of adapters by Triton's kernels, alone and in the engine for GPUs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import dispatch
from kernels.linear import FEW_TOKENS, gated, reference
from kernels.silu_mul import Act, silu_mul
from shared.wire.messages import SamplingParams
from tests.kernels.test_adapt_on_device import (
    test_a_token_has_the_same_deltas_in_any_step,
    test_each_row_has_the_deltas_of_its_slot,
)
from tests.services.worker.adapters.made import (
    DIGESTS,
    engine_with,
    make_adapter,
    shapes_of,
    texts_of,
)
from tests.services.worker.checkpoints import random_prompts, save_qwen2

__all__ = [
    "test_a_token_has_the_same_deltas_in_any_step",
    "test_each_row_has_the_deltas_of_its_slot",
]


@pytest.mark.parametrize("num_tokens", [3, FEW_TOKENS + 1])
@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_gates_and_ups_get_deltas_before_the_activation(num_tokens: int, act: Act) -> None:
    x, weight = torch.randn(num_tokens, 32), torch.randn(48, 32) / 6
    deltas = torch.randn(num_tokens, 48) * (torch.arange(num_tokens) % 2)[:, None]

    def add(products: Tensor) -> None:
        products += deltas

    found = gated(x, weight, act=act, add=add)
    wanted = silu_mul(reference.linear(x, weight) + deltas, act)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(found[::2], gated(x, weight, act=act)[::2])


def test_texts_match_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_qwen2(tmp_path, num_hidden_layers=1)
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=2, logprobs=0)
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "IS_INTERPRETED", False)
        shapes = shapes_of(tmp_path)
        adapters = [make_adapter(shapes, digest) for digest in DIGESTS[:2]]
        prompts, digests = random_prompts(3), [*DIGESTS[:2], ""]
        wanted = texts_of(engine_with(tmp_path, "torch", adapters), prompts, digests, params)
        plain = texts_of(engine_with(tmp_path, "torch"), prompts, [""] * 3, params)
    few = {"max_num_seqs": 3, "max_lora_rank": 8, "cudagraph_capture_sizes": [3]}
    engine = engine_with(tmp_path, "device", adapters, **few)
    found = texts_of(engine, prompts, digests, params)
    assert [ids for ids, _ in found] == [ids for ids, _ in wanted]
    for (_, logprobs), (_, others) in zip(found, wanted, strict=True):
        assert abs(logprobs - others).max() < 1e-3
    assert all(abs(found[i][1] - plain[i][1]).max() > 0.01 for i in range(2))

"""Layers in host memory, copied by a GPU: outputs are unchanged for every mix of graphs, and GPU
memory holds two layers. Needs a GPU: `pytest -m gpu`."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.shapes import QWEN3_8B, write_model
from benchmarks.harness import scheduled
from services.worker.engine.device.engine import DeviceEngine
from services.worker.engine.device.offload.offloaded import OffloadedLayers
from shared.wire.messages import SamplingParams
from tests.gpu.engines import drafting, make_cuda_engine, prompts

pytestmark = pytest.mark.gpu
ALL = 1.0  # GiB of the embedded model
PARAMS = [SamplingParams(seed=seed, temperature=0.8, max_tokens=40) for seed in range(8)]
SLACK_BYTES = 1 << 30  # KV cache, logits and the current GEMM's output


def offloaded_of(engine: DeviceEngine) -> OffloadedLayers:
    offloaded = engine._segments.model.offloaded
    assert isinstance(offloaded, OffloadedLayers)
    return offloaded


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"enforce_eager": True},
        {"quantization": "wint4"},
        {"speculative_config": drafting(2)},
        {"max_num_batched_tokens": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("gib", [0.008, ALL])  # three of six layers in float32, or all
def test_texts_match_runs_without(settings: dict[str, Any], gib: float) -> None:
    settings = {"speculative_config": drafting(0)} | settings
    engine = make_cuda_engine(cpu_offload_gb=gib, **settings)
    assert offloaded_of(engine).num_layers >= 3
    found = scheduled.run(engine, prompts(), PARAMS)
    wanted = scheduled.run(make_cuda_engine(**settings), prompts(), PARAMS)
    assert found.texts == wanted.texts
    assert found.verified == wanted.verified


def test_steps_are_graphs_and_arenas_are_pinned() -> None:
    engine = make_cuda_engine(cpu_offload_gb=ALL)
    assert len(engine._graphs) > 0
    assert offloaded_of(engine).why_not_pinned == ""
    assert all(arena.memory.is_pinned() for arena in offloaded_of(engine)._arenas)


def test_the_card_has_two_layers_while_all_are_loaded_and_afterwards(tmp_path: Path) -> None:
    """With a model of 0.36 GiB per layer."""
    folder = write_model(tmp_path / "model", QWEN3_8B | {"num_hidden_layers": 12})
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    engine = make_cuda_engine(
        folder,
        load_format="dummy",
        dtype="bfloat16",
        cpu_offload_gb=100,
        max_model_len=256,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=128,
    )
    offloaded = offloaded_of(engine)
    assert offloaded.num_layers == 12
    embedding_and_head = 2 * QWEN3_8B["vocab_size"] * QWEN3_8B["hidden_size"] * 2
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < embedding_and_head + offloaded.buffer_bytes + SLACK_BYTES
    assert scheduled.run(engine, [[1, 2, 3]], PARAMS[0]).texts[0]


def test_engines_that_are_dropped_give_their_pinned_memory_back() -> None:
    arenas = []
    for _ in range(3):
        engine = make_cuda_engine(cpu_offload_gb=ALL, enforce_eager=True)
        arenas.append(offloaded_of(engine)._arenas[0].memory)
        assert arenas[-1].is_pinned()
        del engine
        gc.collect()
    assert not any(memory.is_pinned() for memory in arenas)

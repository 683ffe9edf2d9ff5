"""Sequences go on at another worker from the bits of their blocks."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
)

from benchmarks.harness.engines import ENGINES
from cli.keys import write_keys
from services.worker.moves import addition
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from shared.wire.messages import Discard, Meet, Push, Take
from tests.services.worker.checkpoints import save_model
from tests.services.worker.moves.worker import Output, key_of, random_ids, working
from tests.services.worker.test_families import CASES

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
    "experts": (MixtralForCausalLM, {"num_local_experts": 8}),
    "latent": (DeepseekV3ForCausalLM, CASES["deepseek v3, yarn"][1]),
    "indexed": (DeepseekV32ForCausalLM, CASES["deepseek v3.2, yarn"][1]),
}
BACKENDS: list[Any] = [
    ("qwen3", "native", {}),
    ("experts", "native", {"kv_cache_dtype": "int8"}),
    ("indexed", "native", {}),
    pytest.param("qwen3", "native", {"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
    pytest.param("qwen3", "torch", {"kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    pytest.param("latent", "torch", {}, marks=pytest.mark.slow),
    pytest.param("latent", "native", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
]
MTP = {"speculative_config": {"method": "mtp", "adaptive": False}}


@pytest.mark.parametrize(("family", "kernels", "settings"), BACKENDS, ids=str)
async def test_a_sequence_goes_on_at_another_worker(
    family: str, kernels: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    kind, changes = FAMILIES[family]
    save_model(tmp_path / "model", kind, **changes)
    await assert_goes_on(tmp_path / "model", tmp_path, kernels, 150, settings)


@pytest.mark.parametrize("kernels", ["native", pytest.param("torch", marks=pytest.mark.slow)])
async def test_drafts_go_on_too(kernels: str, tmp_path: Path) -> None:
    await assert_goes_on(EMBEDDED_MODEL, tmp_path, kernels, 8000, MTP, depth=2)


async def test_blocks_move_between_machines(checkpoint: Path, tmp_path: Path) -> None:
    """Over tcp, by workers that prove their service."""
    write_keys(tmp_path / "keys")
    settings = {"keys": tmp_path / "keys", "kv_transfer_address": "tcp://127.0.0.1:0"}
    await assert_goes_on(checkpoint, tmp_path, "native", 150, settings, is_near=False)


async def assert_goes_on(
    model: Path,
    folder: Path,
    kernels: str,
    vocab_size: int,
    settings: Any,
    depth: int = 0,
    is_near: bool = True,
) -> None:
    size = ENGINES[kernels]["block_size"]
    ids = random_ids(37, vocab_size)
    places = folder / "a", folder if is_near else folder / "b"
    for place in places:
        place.mkdir(exist_ok=True)
    near = folder if is_near else folder / "a"
    async with (
        working(model, near, "a", kernels, **settings) as a,
        working(model, places[1], "b", kernels, **settings) as b,
    ):
        blocks = list(range(3, 3 + 96 // size))
        begun = await a.prefill(ids, len(ids), blocks, 0, depth)
        begun += await a.decode(6, depth)
        known = ids + ids_of(begun)
        whole = (len(known) - 1) // size
        a.meet(b)
        await a.push(b, blocks[:whole])
        await b.arrived(whole)
        others = list(range(40 - 96 // size, 40))
        await b.take(others[:whole])
        assert [b.bytes_of(each) for each in others[:whole]] == [
            a.bytes_of(each) for each in blocks[:whole]
        ]
        assert len({a.bytes_of(each) for each in blocks[:whole]}) == whole
        assert b.num_full == 0
        moved = await b.prefill(known, len(ids), others, whole * size, depth)
        moved += await b.decode(99, depth)
        stayed = await a.decode(99, depth)
        assert ids_of(moved) == ids_of(stayed)
        assert logprobs_of(moved) == pytest.approx(logprobs_of(stayed), abs=1e-5)
        assert bool(b.num_accepted) == bool(depth)


def ids_of(steps: Output) -> list[int]:
    return [each for ids, _ in steps for each in ids]


def logprobs_of(steps: Output) -> list[float]:
    return [each for _, logprobs in steps for each in logprobs]


async def test_rows_of_a_plan_are_done_in_order(checkpoint: Path, tmp_path: Path) -> None:
    """A block is pushed before a take overwrites it, and as the take before has filled it."""
    async with working(checkpoint, tmp_path, "a") as a, working(checkpoint, tmp_path, "b") as b:
        await a.prefill(random_ids(37, 150), 37, [0, 1, 2], 0, 0)
        first, second = a.bytes_of(0), a.bytes_of(1)
        a.meet(b)
        await a.push(b, [0, 1])
        await b.arrived(2)
        assert b.moves.takes(b.home, Meet("b"))
        await b.run(Take(key_of(1), 7), Push(key_of(2), 7, "b"), Take(key_of(0), 7))
        await b.arrived(1)
        await b.run(Take(key_of(2), 8), Discard(key_of(9)))
        assert (b.bytes_of(7), b.bytes_of(8)) == (first, second)


def test_blocks_of_a_worker_on_a_gpu_do_not_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(addition, "is_on_gpu", lambda model: True)
    model: Any = None
    assert addition.make(WorkerConfig(), tmp_path, model, torch.float32) is None
    assert "kv-transfer: no KV block moves: the worker is on a GPU" in caplog.text

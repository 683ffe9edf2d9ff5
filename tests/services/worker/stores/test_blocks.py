"""Blocks have the same bits after a store, and sequences go on from them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import (
    DeepseekV3ForCausalLM,
    DeepseekV32ForCausalLM,
    MixtralForCausalLM,
    Qwen3ForCausalLM,
)

from benchmarks.harness.engines import ENGINES
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import Forget, Load, Save
from tests.services.worker.checkpoints import save_model
from tests.services.worker.stores.worker import StoreWorker, key_of
from tests.services.worker.test_families import CASES

FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3ForCausalLM, {"head_dim": 16}),
    "experts": (MixtralForCausalLM, {"num_local_experts": 8}),
    "latent": (DeepseekV3ForCausalLM, CASES["deepseek v3, yarn"][1]),
    "indexed": (DeepseekV32ForCausalLM, CASES["deepseek v3.2, yarn"][1]),
}
BACKENDS: list[Any] = [
    ("qwen3", "native", {}),
    ("qwen3", "torch", {}),
    ("qwen3", "device", {}),
    ("experts", "native", {"kv_cache_dtype": "int8"}),
    ("latent", "native", {}),
    *(
        pytest.param(family, *case, marks=pytest.mark.slow)
        for family in ("qwen3", "experts")
        for case in (
            ("native", {"kv_cache_dtype": "fp8"}),
            ("torch", {"kv_cache_dtype": "int8"}),
            ("native", {"dtype": "bfloat16"}),
            ("device", {"kv_cache_dtype": "int8", "dtype": "bfloat16"}),
        )
    ),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("latent", "torch", {}),
            ("latent", "device", {}),
            ("latent", "native", {"dtype": "bfloat16"}),
            ("indexed", "native", {}),
            ("indexed", "torch", {}),
            ("indexed", "native", {"dtype": "bfloat16"}),
        )
    ),
]


def random_ids(num: int, vocab_size: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(10, vocab_size, num).tolist()


@pytest.mark.parametrize(("family", "kernels", "settings"), BACKENDS, ids=str)
def test_a_successor_goes_on_with_the_bits_of_its_predecessor(
    family: str, kernels: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    kind, changes = FAMILIES[family]
    save_model(tmp_path / "model", kind, **changes)
    assert_goes_on(tmp_path / "model", tmp_path / "kv", kernels, 150, settings)


@pytest.mark.parametrize(
    "kernels", ["native", "device", pytest.param("torch", marks=pytest.mark.slow)]
)
def test_drafts_go_on_too(kernels: str, tmp_path: Path) -> None:
    mtp = {"speculative_config": {"method": "mtp", "adaptive": False}}
    assert_goes_on(EMBEDDED_MODEL, tmp_path, kernels, 8000, mtp, depth=2)


def assert_goes_on(
    model: Path, folder: Path, kernels: str, vocab_size: int, settings: Any, depth: int = 0
) -> None:
    size = ENGINES[kernels]["block_size"]
    ids = random_ids(2 * 16 + 5, vocab_size)
    num_saved = len(ids) // size
    first = StoreWorker(model, folder, kernels, **settings)
    blocks = list(range(3, 3 + 96 // size))
    text = first.generate(ids, blocks, depth=depth)
    assert first.save(blocks[:num_saved]).unsaved == []
    saved = [first.bytes_of(each) for each in blocks[:num_saved]]
    assert len({*saved}) == num_saved
    store = first.store
    first.close()
    second = StoreWorker(model, folder, kernels, **settings)
    assert second.store == store
    others = list(range(40 - 96 // size, 40))
    copied = second.load(others[:num_saved])
    assert copied.lost == []
    assert [second.bytes_of(each) for each in others[:num_saved]] == saved
    assert second.generate(ids, others, num_cached=num_saved * size, depth=depth) == text
    assert bool(second.num_accepted) == bool(depth)
    second.close()


def test_another_worker_of_the_folder_reads_the_store_too(checkpoint: Path, tmp_path: Path) -> None:
    one, two = (StoreWorker(checkpoint, tmp_path) for _ in range(2))
    assert one.part.location == two.part.location
    assert one.store != two.store
    ids = random_ids(37, 150)
    text = one.generate(ids, [0, 1, 2, 3, 4])
    one.save([0, 1])
    assert two.load([5, 6], one.store).lost == []
    one.close()
    assert two.load([7, 8], one.store).lost == []
    assert [two.bytes_of(each) for each in (7, 8)] == [one.bytes_of(each) for each in (0, 1)]
    assert two.generate(ids, [7, 8, 9, 10, 11], num_cached=32) == text
    two.close()


@pytest.mark.parametrize("kernels", ["native", "device"])
def test_rows_of_a_plan_are_done_in_order(kernels: str, checkpoint: Path, tmp_path: Path) -> None:
    """A block is saved and gets another one's bytes; so does a place."""
    worker = StoreWorker(checkpoint, tmp_path, kernels, block_size=16)
    worker.generate(random_ids(37, 150), [0, 1, 2, 3, 4, 5, 6, 7])
    worker.save([0, 1])
    first, second = worker.bytes_of(0), worker.bytes_of(1)
    rows: list[Forget | Save | Load] = [
        Forget(1),
        Save(key_of(7), 1, 0),
        Save(key_of(8), 0, 1),
        Load(key_of(7), 0, worker.store, 0),
        Load(key_of(8), 1, worker.store, 1),
        Load(key_of(0), 9, worker.store, 0),
    ]
    copied = worker.copy(rows)
    assert (copied.lost, copied.unsaved) == ([key_of(0)], [])
    assert (worker.bytes_of(0), worker.bytes_of(1)) == (second, first)
    assert not any(worker.bytes_of(9))
    worker.close()

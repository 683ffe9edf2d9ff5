"""Blocks of layers with windows have the same bits after a store, and sequences go on from them."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from services.worker.block_layout.layout import facts_of_groups
from shared.wire.kv_groups import num_passed
from shared.wire.messages import EVERY_LAYER, Group
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.worker import StoreWorker

MAX_LEN, NUM_CACHED = 240, 144  # of 150 ids; no window is longer than 16
IDS = random_ids(150, 150)
BACKENDS: list[Any] = [
    ("Gemma3ForCausalLM", "native", {}),
    ("GptOssForCausalLM", "native", {"kv_cache_dtype": "int8"}),
    ("Lfm2ForCausalLM", "native", {}),
    ("Gemma4ForCausalLM", "native", {"kv_cache_dtype": "int8"}),
    ("MistralForCausalLM", "torch", {}),
    ("MistralForCausalLM", "device", {}),
    pytest.param("Gemma3ForCausalLM", "torch", {"dtype": "bfloat16"}, marks=pytest.mark.slow),
    pytest.param("Lfm2ForCausalLM", "torch", {}, marks=pytest.mark.slow),
    pytest.param("MistralForCausalLM", "native", {"kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
]


class Tables:
    """The blocks of a sequence of ``worker`` from block ``first`` on, group by group, as a prefix
    of ``NUM_CACHED`` ids needs them."""

    def __init__(self, worker: StoreWorker, first: int) -> None:
        size, capacity = worker.block_size, worker.engine.capacity
        num = MAX_LEN // size
        self.whole = [
            list(range(first + num * group, first + num * (group + 1)))
            for group in range(len(capacity.groups))
        ]
        passed = [num_passed(each, NUM_CACHED, size) for each in capacity.groups]
        pairs = list(zip(self.whole, passed, strict=True))
        self.needed = [block for blocks, num in pairs for block in blocks[num : NUM_CACHED // size]]
        null = [capacity.num_blocks]
        self.later = [null * num + blocks[num:] for blocks, num in pairs]
        assert any(passed)


@pytest.mark.parametrize(("name", "kernels", "settings"), BACKENDS, ids=str)
def test_a_successor_goes_on_from_the_last_blocks_of_each_group(
    name: str, kernels: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    save_family(tmp_path / "model", name, max_position_embeddings=MAX_LEN)
    sizes = {"max_model_len": MAX_LEN, "num_gpu_blocks_override": 1024}

    def start() -> StoreWorker:
        return StoreWorker(tmp_path / "model", tmp_path / "kv", kernels, **(sizes | settings))

    first = start()
    tables = Tables(first, 5)
    text = first.generate(IDS, *tables.whole)
    assert first.save(tables.needed).unsaved == []
    saved = [first.bytes_of(each) for each in tables.needed]
    assert all(map(any, saved))
    first.close()
    second = start()
    assert second.store == first.store
    tables = Tables(second, 300)
    assert second.load(tables.needed).lost == []
    assert [second.bytes_of(each) for each in tables.needed] == saved
    assert second.generate(IDS, *tables.later, num_cached=NUM_CACHED) == text
    for block in tables.needed:
        second.clear(block)
    assert second.generate(IDS, *tables.later, num_cached=NUM_CACHED) != text, "they are read"
    second.close()


def test_the_groups_of_layers_are_a_part_of_the_digest() -> None:
    def facts(*groups: Group, of_layers: tuple[int, ...] = (0, 1, 0)) -> list[object]:
        layers = [SimpleNamespace(number=each, group=group) for each, group in enumerate(of_layers)]
        model: Any = SimpleNamespace(groups=groups, cached_layers=lambda: layers)
        return facts_of_groups(model)

    mine = Group(), Group(8)
    assert facts(*EVERY_LAYER) == []
    assert facts(*mine) == facts(*mine)
    others = facts(Group(), Group(9)), facts(*mine, of_layers=(0, 1, 1)), facts(Group(8), Group(8))
    assert all(each != facts(*mine) for each in others)

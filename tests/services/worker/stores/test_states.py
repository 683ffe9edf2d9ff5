"""States have the same bits after a store, and sequences of hybrids go on from them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.delta import LayerStates
from services.worker.block_layout.layout import facts_of_states
from services.worker.stores.folder import STATES
from services.worker.stores.opening import split
from shared.errors import ConfigError
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.stores.test_blocks import random_ids
from tests.services.worker.stores.worker import StoreWorker, key_of

IDS = random_ids(100, 150)  # their state is copied behind 64
NUM_COPIED = 64
BACKENDS: list[Any] = [
    ("qwen3.5", "native", {"kv_cache_dtype": "int8"}),
    ("qwen3.5", "torch", {}),
    ("qwen3.5", "device", {}),
    ("granite 4, tied", "native", {}),
    pytest.param("qwen3-next", "native", {}, marks=pytest.mark.slow),
    pytest.param("nemotron 3", "native", {}, marks=pytest.mark.slow),
    pytest.param("kimi", "native", {}, marks=pytest.mark.slow),
    pytest.param("kimi", "torch", {}, marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("hybrid") / "model"
    save_hybrid(model, "qwen3.5")
    return model


def blocks_of(worker: StoreWorker, first: int) -> list[int]:
    return list(range(first, first + 128 // worker.block_size))


def saved(worker: StoreWorker) -> list[int]:
    """The text of ``IDS``; their first blocks are saved, and the next state."""
    text = worker.generate(IDS, blocks_of(worker, 3), state=1)
    assert worker.save(blocks_of(worker, 3)[: NUM_COPIED // worker.block_size]).unsaved == []
    assert worker.save_state(1).unsaved == []
    return text


@pytest.mark.parametrize(("name", "kernels", "settings"), BACKENDS, ids=str)
def test_a_successor_goes_on_from_the_state_of_its_predecessor(
    name: str, kernels: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    save_hybrid(model, name)
    first = StoreWorker(model, tmp_path / "kv", kernels, **settings)
    text = saved(first)
    state = first.bytes_of_state(1)
    first.close()
    second = StoreWorker(model, tmp_path / "kv", kernels, **settings)
    assert second.store == first.store
    blocks = blocks_of(second, 20)
    for copy in (0, 1):
        second.admit(IDS, blocks, num_cached=NUM_COPIED, state=copy)
        assert second.load(blocks[: NUM_COPIED // second.block_size]).lost == []
        assert second.load_state(copy, slot=0).lost == []
        assert second.bytes_of_state(copy) == state
        assert second.finish(len(IDS) - NUM_COPIED) == text
    second.close()


@pytest.mark.parametrize(("offset", "kernels"), [(0, "native"), (100, "native"), (0, "device")])
def test_a_flipped_bit_loses_its_state(
    offset: int, kernels: str, hybrid: Path, tmp_path: Path
) -> None:
    worker = StoreWorker(hybrid, tmp_path, kernels)
    text = saved(worker)
    worker.save_state(1, place=1)
    (path,) = tmp_path.glob(f"*/0/{STATES}")
    with path.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)[0]
        stream.seek(offset)
        stream.write(bytes([byte ^ 1]))
    blocks = blocks_of(worker, 20)
    worker.admit(IDS, blocks, num_cached=NUM_COPIED, state=0)
    assert worker.load(blocks[: NUM_COPIED // worker.block_size]).lost == []
    with pytest.raises(ValueError, match="the state of slot 0 was not loaded"):
        worker.finish(len(IDS) - NUM_COPIED)
    assert worker.load_state(0, slot=0).lost == [key_of(0)]
    assert not any(worker.bytes_of_state(0))
    with pytest.raises(ValueError, match="the state of slot 0 was not loaded"):
        worker.finish(len(IDS) - NUM_COPIED)
    assert worker.load_state(0, slot=0, place=1).lost == []
    assert worker.finish(len(IDS) - NUM_COPIED) == text
    worker.close()


def test_a_block_is_no_state(hybrid: Path, tmp_path: Path) -> None:
    worker = StoreWorker(hybrid, tmp_path)
    saved(worker)
    num_places = worker.part.own.header.num_places
    assert worker.load([5], first=num_places).lost == [key_of(num_places)]
    worker.close()


def test_the_layout_of_states_is_a_part_of_the_digest() -> None:
    def facts(num: int = 2, width: int = 3, dtype: torch.dtype = torch.float32) -> list[object]:
        kept = torch.zeros(5, 0, 7)
        layer = LayerStates(torch.zeros(5, 2, 4, 8), torch.zeros(5, width, 6, dtype=dtype), kept)
        return facts_of_states([layer] * num)

    others = [facts(num=3), facts(width=2), facts(dtype=torch.bfloat16)]
    assert all(each != facts() for each in others)


@pytest.mark.parametrize(
    ("num_bytes", "state_bytes", "wanted"),
    [
        (1000, 0, (100, 0)),
        (1000, 5, (89, 22)),  # one for four blocks
        (1000, 250, (50, 2)),  # half of all
        (1000, 501, (100, 0)),
    ],
)
def test_states_have_half_of_a_store_at_most(
    num_bytes: int, state_bytes: int, wanted: tuple[int, int]
) -> None:
    assert split(num_bytes, 10, state_bytes, 4) == wanted


def test_a_store_has_a_place_for_a_state(hybrid: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"size: 1 bytes are less than 4 blocks and a state of"):
        StoreWorker(hybrid, tmp_path, kv_offloading_size=1e-9)

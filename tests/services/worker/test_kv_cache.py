"""A cache with a different layout for each layer."""

from collections.abc import Sequence
from copy import copy
from itertools import accumulate
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness import scheduled
from benchmarks.harness.engines import KERNELS, make_engine
from kernels.cpu.library import variants
from kernels.kv_layout import KVLayout
from services.worker.backends.torch_lm import TorchLM
from services.worker.machine import kv_cache
from services.worker.machine.kv_cache import KVCache
from services.worker.machine.kv_groups import Packed, Place, pack
from services.worker.models.decoder import DecoderLayer
from services.worker.models.llama import LlamaForCausalLM
from services.worker.models.parts import Parts
from services.worker.models.registry import MODELS
from shared.wire.messages import SamplingParams
from tests.selection import only
from tests.services.worker.checkpoints import save_mimo
from tests.services.worker.device_contexts import OnDevice
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.test_memory import planned_bytes
from tests.services.worker.test_native import (
    furthest,
    make_config,
    make_model,
    make_native,
    random_prompts,
    run,
)

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE = 6, 4
LAYOUTS = [
    KVLayout((2, 3, 5), torch.bfloat16),
    KVLayout((7,), torch.int8),  # the next layer does not begin at this one's end
    KVLayout((2, 0, 0), torch.float32),
    KVLayout((2, 1, 8), torch.float32),
    KVLayout((2, 3, 5), torch.bfloat16, torch.int8),
    KVLayout((2, 3, 6), torch.bfloat16, torch.uint8),
]
SHAPES = [
    *((7, 4, 2, 3, 5), (7, 4, 7), (7, 4, 2, 0, 0), (7, 4, 2, 1, 8)),
    *((7, 4, 2, 3, 5), (7, 4, 2, 3), (7, 4, 2, 3, 6), (7, 4, 2, 3)),
]
FLOAT32, INT8 = torch.float32, torch.int8
DTYPES = [torch.bfloat16, INT8, FLOAT32, FLOAT32, INT8, FLOAT32, torch.uint8, FLOAT32]


@pytest.fixture
def cache() -> KVCache:
    """The tensors are filled with 1, 2, 3 … in order."""
    cache = KVCache(LAYOUTS, NUM_BLOCKS, BLOCK_SIZE, CPU)
    assert not any(tensor.any() for tensor in tensors(cache))
    for value, tensor in enumerate(tensors(cache), 1):
        tensor.fill_(value)
    return cache


def tensors(cache: KVCache) -> list[Tensor]:
    """Entries and, if quantized, scales of all layers."""
    return [tensor for layer in cache.layers for tensor in layer if tensor is not None]


def zeroed_slots(tensor: Tensor) -> list[int]:
    """In a cache without zeros: the slots with a fully zeroed entry."""
    entries = tensor.flatten(0, 1).flatten(1)
    is_zero = entries == 0
    assert torch.equal(is_zero.any(1), is_zero.all(1))
    return torch.nonzero(is_zero.all(1)).flatten().tolist()


def test_layers_are_of_their_layouts_and_no_two_share_a_byte(cache: KVCache) -> None:
    found = tensors(cache)
    assert [tuple(tensor.shape) for tensor in found] == SHAPES
    assert [tensor.dtype for tensor in found] == DTYPES
    assert cache.dtype == torch.bfloat16
    assert all(tensor.is_contiguous() for tensor in found)
    assert all((tensor == value).all() for value, tensor in enumerate(found, 1))
    num_bytes = sum(tensor.nbytes for tensor in found)
    of_codes = 2 * 3 * (5 + 4) + 2 * 3 * (6 + 4)
    assert num_bytes == 7 * 4 * (2 * 3 * 5 * 2 + 7 + 0 + 2 * 8 * 4 + of_codes)
    assert num_bytes == 7 * 4 * sum(layout.num_bytes for layout in LAYOUTS)


def test_only_the_blocks_or_slots_that_are_named_are_zeroed_in_all_layers(cache: KVCache) -> None:
    kept = [tensor for tensor in tensors(cache) if tensor.numel()]
    num = len(kept)
    cache.clear(np.zeros(0, np.int64))
    assert [zeroed_slots(each) for each in kept] == [[]] * num
    cache.clear_slots([torch.tensor([3, 9])])
    assert [zeroed_slots(each) for each in kept] == [[3, 9]] * num
    cache.clear(np.array([4, 1]))
    assert [zeroed_slots(each) for each in kept] == [[3, *range(4, 8), 9, *range(16, 20)]] * num


def test_layers_of_several_groups_share_memory() -> None:
    layout = KVLayout((2, 1, 8), torch.float32)
    cache = KVCache([layout] * 5, NUM_BLOCKS, BLOCK_SIZE, CPU, groups=[0, 1, 0, 2, 2])
    places = [layer.entries.data_ptr() for layer in cache.layers]
    assert places[0] == places[1] == places[3] != places[2] == places[4]
    assert all(layer.entries.is_contiguous() for layer in cache.layers)
    for layer in cache.layers:
        layer.entries.fill_(1.0)
    cache.clear(np.array([2]))
    cache.clear_slots([torch.tensor([0])] * 3)
    assert [zeroed_slots(layer.entries) for layer in cache.layers] == [[0, 8, 9, 10, 11]] * 5


@pytest.mark.parametrize("codes", [None, torch.int8])
def test_two_small_layers_have_the_memory_of_a_large_one(codes: torch.dtype | None) -> None:
    """Scales of the same number of heads are equally large in each layer, in other sections."""
    small, large = (KVLayout((2, 2, size), torch.bfloat16, codes) for size in (4, 8))
    cache = KVCache([small, large, small], NUM_BLOCKS, BLOCK_SIZE, CPU, groups=[0, 1, 0])
    first, shared, second = (layer.entries for layer in cache.layers)
    assert first.data_ptr() == shared.data_ptr()
    assert second.data_ptr() - first.data_ptr() == first[0].nbytes
    for value, entries in enumerate((first, second), 1):
        entries.fill_(value)
    shared[3].fill_(3)
    for value, entries in enumerate((first, second), 1):
        is_own = entries.flatten(1) == value
        assert is_own.all(1).tolist() == [block != 3 for block in range(NUM_BLOCKS + 1)]
    for tensor in tensors(cache):
        tensor.fill_(1)
    cache.clear_slots([torch.tensor([9]), torch.tensor([], dtype=torch.int64)])
    assert [zeroed_slots(each) for each in (first, second)] == [[9]] * 2
    assert torch.nonzero((shared == 0).flatten(1).any(1)).tolist() == [[2]]
    assert (shared[2] == 0).sum() == 2 * first[0, 0].numel()


def in_one_section(sizes: Sequence[int], groups: Sequence[int]) -> Packed:
    """No layer's blocks are contiguous."""
    sections, places = pack(sizes, groups)
    starts = [0, *accumulate(sections)]
    found = [Place(0, starts[each.section] + each.start, each.size) for each in places]
    return Packed([sum(sections)], found)


@pytest.mark.parametrize(
    ("name", "kernels"),
    only(
        [("Lfm2ForCausalLM", "native"), ("GptOssForCausalLM", "torch")],
        *(["Lfm2ForCausalLM", "GptOssForCausalLM"], KERNELS),
    ),
)
def test_blocks_of_a_layer_may_lie_apart(
    tmp_path: Path, name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_family(tmp_path, name)
    prompts = [list(range(8, 8 + num)) for num in (40, 3)]
    params = SamplingParams(seed=1, temperature=0.5, max_tokens=20, logprobs=2)
    expected = scheduled.run(make_engine(tmp_path, kernels), prompts, params)
    monkeypatch.setattr(kv_cache, "pack", in_one_section)
    engine = make_engine(tmp_path, kernels)
    assert not any(each.entries.is_contiguous() for each in engine._kv_cache.layers)
    found = scheduled.run(engine, prompts, params)
    assert found.texts == expected.texts
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        assert np.array(ours).tobytes() == np.array(theirs).tobytes()


@pytest.mark.parametrize(
    ("name", "num_groups", "num_in_block"),
    [("Gemma3ForCausalLM", 2, 2), ("MistralForCausalLM", 1, 4), ("LlamaForCausalLM", 1, 4)],
)
def test_a_block_has_room_for_the_layers_of_a_group(
    tmp_path: Path, name: str, num_groups: int, num_in_block: int
) -> None:
    save_family(tmp_path, name)
    engine = make_engine(tmp_path, num_gpu_blocks_override=100)
    assert len(engine.capacity.groups) == num_groups
    layers = engine._kv_cache.layers
    assert len(layers) == 4
    assert len({layer.entries.data_ptr() for layer in layers}) == num_in_block
    assert planned_bytes("kv_cache") == 100 * 4 * 2 * 2 * 16 * 4 * num_in_block


def test_each_layer_of_transformers_keeps_its_own_keys(tmp_path: Path) -> None:
    """Layers with a window have twice the KV heads of the others, and groups of half the size."""
    save_family(tmp_path, "MiMoV2FlashForCausalLM")
    engine = make_engine(tmp_path, num_gpu_blocks_override=100, block_size=4)
    assert len(engine.capacity.groups) == 3
    assert [tuple(layer.entries.shape) for layer in engine._kv_cache.layers] == [
        (101, 4, 2, num_heads, 16) for num_heads in (4, 2, 4, 2)
    ]
    assert planned_bytes("kv_cache") == 100 * 4 * 2 * 4 * 16 * 4


@pytest.mark.parametrize(("method", "num_layers"), [("mtp", 4), ("none", 3)])
def test_an_mtp_head_has_a_layer_where_it_drafts(
    tmp_path: Path, method: str, num_layers: int
) -> None:
    save_mimo(tmp_path, num_mtp_layers=2)
    drafts = {"method": method}
    engine = make_engine(tmp_path, speculative_config=drafts, num_gpu_blocks_override=40)
    assert [tuple(layer.entries.shape) for layer in engine._kv_cache.layers] == [
        (41, 4, 2, 2, 16)
    ] * num_layers
    assert planned_bytes("kv_cache") == 40 * 4 * 2 * 2 * 16 * 4 * num_layers


class SharingForCausalLM(LlamaForCausalLM):
    """A Llama with one KV head in its second layer, and the config's number in the others."""

    def make_layer(self, parts: Parts, layer: int) -> DecoderLayer:
        own = copy(parts)
        if layer == 1:
            own._config = msgspec.structs.replace(self.config, num_kv_heads=1)
        return super().make_layer(own, layer)


@pytest.mark.usefixtures("_unwritten_memory")
def test_our_own_layers_may_keep_different_things_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head shared by all queries equals several equal heads."""
    monkeypatch.setitem(MODELS, "SharingForCausalLM", __name__)
    config, prompts = (
        make_config("Llama, a head of 256, a key for each query"),
        random_prompts(9, 70),
    )
    sharing = msgspec.structs.replace(config, architectures=["SharingForCausalLM"])
    model, alike = make_model(sharing, torch.float32), make_model(config, torch.float32)
    layouts = model.kv_layouts(torch.float32, drafts=False)
    assert [layout.entry for layout in layouts] == [(2, 2, 256), (2, 1, 256)]
    for name, parameter in alike.named_parameters():
        own = model.get_parameter(name).data
        if parameter.shape != own.shape:
            queries, key, value = own.split([512, 256, 256])
            own = torch.cat((queries, key, key, value, value))
        parameter.data.copy_(own)
    expected = run(TorchLM(alike), config, torch.float32, prompts, 40)
    assert all(logits.std() > 0.15 for logits in expected)
    native = make_native(sharing, torch.float32, variants()[0], 16, 1)
    for each in (TorchLM(model), OnDevice(TorchLM(model)), native):
        found = run(each, sharing, torch.float32, prompts, 40, layouts=layouts)
        assert furthest(found, expected) < 1e-4

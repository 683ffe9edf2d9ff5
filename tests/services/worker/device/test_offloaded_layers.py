"""Prefetched weights: every layer computes with its own, for any time of the copies between their
start and the wait."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from kernels.codes import Codes
from services.worker.engine.device.offload.copies import Wait
from services.worker.engine.device.offload.offloaded import NUM_BUFFERS, Arena, OffloadedLayers
from services.worker.engine.device.offload.placement import spread
from services.worker.engine.device.stack_experts import stack_experts
from services.worker.layers.experts import Experts
from services.worker.layers.weights import Quantized
from services.worker.weights import weight_placement
from services.worker.weights.load import quantize
from services.worker.weights.online import ONLINE, Quantization
from services.worker.weights.weight_placement import make_placement
from shared.errors import ConfigError
from tests.services.worker.test_stack_experts import linears, make

CPU = torch.device("cpu")
NUM_LAYERS = 7


def test_without_the_part_that_offloads_no_layer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_placement, "PLACEMENTS", [])
    assert make_placement(nn.Module(), CPU, [], 0).offloaded() is None
    with pytest.raises(ConfigError, match=r"cpu-offload-gb: .* not installed"):
        make_placement(nn.Module(), CPU, [], 1)


class LateStream:
    """Copies when ``is_due`` is true, evaluated at every event, or at the latest when the copy is
    waited for. ``begun`` and ``done`` have the sources in order."""

    def __init__(self, is_due: Callable[[], bool]) -> None:
        self.begun: list[Tensor] = []
        self.done: list[Tensor] = []
        self._is_due = is_due
        self._pending: deque[tuple[Tensor, Tensor]] = deque()

    def copy(self, source: Tensor, destination: Tensor) -> Wait:
        self.begun.append(source)
        self._pending.append((source, destination))
        self.look()
        num_begun = len(self.begun)
        return lambda: self._run_until(num_begun)

    def look(self) -> None:
        while self._pending and self._is_due():
            self._run_until(len(self.done) + 1)

    def _run_until(self, num_done: int) -> None:
        while len(self.done) < num_done:
            source, destination = self._pending.popleft()
            destination.copy_(source)
            self.done.append(source)


def make_layers(num: int = NUM_LAYERS) -> list[nn.Module]:
    """Of different sizes, as in some families."""
    generator = torch.Generator().manual_seed(1)
    layers: list[nn.Module] = []
    for size in range(num):
        layer: nn.Module = nn.Sequential(nn.Linear(8, 8 + size % 3), nn.LayerNorm(5))
        layer.requires_grad_(requires_grad=False)
        for parameter in layer.parameters():
            parameter.normal_(generator=generator)
        layers.append(layer)
    return layers


def values_of(layer: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in (*layer.parameters(), *layer.buffers())]


def assert_own(layer: nn.Module, own: list[Tensor]) -> None:
    for found, expected in zip(values_of(layer), own, strict=True):
        assert torch.equal(found, expected)


def schedules() -> Iterator[Callable[[], bool]]:
    """As early as possible, as late as possible, and at random."""
    yield lambda: True
    yield lambda: False
    for seed in range(20):
        rng = random.Random(seed)
        yield lambda rng=rng: rng.random() < 0.5  # type: ignore[misc]


def offload(num: int, is_due: Callable[[], bool]) -> tuple[OffloadedLayers, LateStream, list]:
    """``num`` of the layers, and all layers' weights."""
    layers = make_layers()
    own = [values_of(layer) for layer in layers]
    arenas = [Arena(layers[place]) for place in spread(num, NUM_LAYERS)]
    offloaded = OffloadedLayers(layers, arenas, CPU)
    stream = LateStream(is_due)
    offloaded._stream = stream
    return offloaded, stream, list(zip(layers, own, strict=True))


@pytest.mark.parametrize("num", range(3, NUM_LAYERS + 1))
def test_every_layer_is_computed_with_its_own_weights_whenever_copies_happen(num: int) -> None:
    for is_due in schedules():
        offloaded, stream, layers = offload(num, is_due)
        for _ in range(3):
            for layer, own in layers:
                offloaded.enter(layer)
                assert_own(layer, own)
                stream.look()  # while it is computed
                assert_own(layer, own)
        assert len(stream.done) == 3 * num, "each once in each pass"


@pytest.mark.parametrize("num", [3, 4, NUM_LAYERS])
def test_while_a_layer_is_computed_the_next_one_is_copied(num: int) -> None:
    offloaded, stream, layers = offload(num, lambda: False)
    places = spread(num, NUM_LAYERS)
    for place, (layer, _) in enumerate(layers):
        offloaded.enter(layer)
        num_due = sum(each <= place for each in places)  # their copies are waited for
        assert len(stream.done) == num_due
        ahead = NUM_BUFFERS - (place in places)
        assert len(stream.begun) == min(num, num_due + ahead)


def test_a_pass_that_broke_off_does_not_disturb_the_next(subtests: pytest.Subtests) -> None:
    for num_entered in range(NUM_LAYERS):
        for is_due in schedules():
            with subtests.test(num_entered=num_entered):
                offloaded, stream, layers = offload(5, is_due)
                for layer, _ in layers[:num_entered]:
                    offloaded.enter(layer)
                for layer, own in layers:
                    offloaded.enter(layer)
                    stream.look()
                    assert_own(layer, own)


def test_copies_by_a_thread() -> None:
    layers = make_layers()
    own = [values_of(layer) for layer in layers]
    offloaded = OffloadedLayers(layers, [Arena(layer) for layer in layers], CPU)
    for _ in range(50):
        for layer, values in zip(layers, own, strict=True):
            offloaded.enter(layer)
            assert_own(layer, values)
    assert offloaded.measure() > 0


@pytest.mark.parametrize("form", ONLINE)
def test_weights_in_codes_keep_every_bit(form: Quantization) -> None:
    """Tables and scales too, which are views of bytes like everything in an arena."""
    layers: list[nn.Module] = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        layers.append(nn.ModuleList([ONLINE[form](torch.randn(24, 128, generator=generator))]))
    own = [values_of(layer) for layer in layers]
    numbers = [layer[0].values for layer in layers]  # type: ignore[index]
    offloaded = OffloadedLayers(layers, [Arena(layer) for layer in layers], CPU)
    for layer, values, expected in zip(layers, own, numbers, strict=True):
        offloaded.enter(layer)
        assert_own(layer, values)
        weight = layer[0]  # type: ignore[index]
        assert isinstance(weight, Quantized)
        assert torch.equal(weight.values, expected)
        starts = [tensor.data_ptr() for tensor in (*weight.parameters(), *weight.buffers())]
        first = offloaded._buffers[layers.index(layer) % 2].data_ptr()
        assert all((start - first) % 256 == 0 for start in starts)


@pytest.mark.parametrize("form", ["none", "wint8", "wint4"])
def test_experts_that_kernels_read_as_one_are_one_in_the_buffers(form: Quantization) -> None:
    model = make(num_hidden_layers=4)
    for part in ("gate_up_proj", "down_proj"):
        for products in linears(model, part):
            for linear in products:
                quantize(linear, form)
    stack_experts(model)
    layers = list(model.model.layers)
    wanted = [stacks_of(layer) for layer in layers]
    offloaded = OffloadedLayers(layers, [Arena(layer) for layer in layers], CPU)
    for turn, (layer, tensors) in enumerate(zip(layers, wanted, strict=True)):
        offloaded.enter(layer)
        buffer = offloaded._buffers[turn % NUM_BUFFERS].untyped_storage().data_ptr()
        for found, expected in zip(stacks_of(layer, copied=False), tensors, strict=True):
            assert torch.equal(found, expected)
            assert found.untyped_storage().data_ptr() == buffer


def stacks_of(layer: nn.Module, *, copied: bool = True) -> list[Tensor]:
    """The expert weights read by kernels."""
    (stacks,) = (module.stacks for module in layer.modules() if isinstance(module, Experts))
    assert stacks is not None
    parts = [
        (each.codes, each.scales) if isinstance(each, Codes) else (each,) for each in stacks[:2]
    ]
    return [each.clone() if copied else each for part in parts for each in part]


@pytest.mark.parametrize("total", [3, 4, 7, 36, 80])
def test_layers_on_the_host_are_spread_evenly_and_the_last_is_one(total: int) -> None:
    for num in range(1, total + 1):
        places = spread(num, total)
        assert places[-1] == total - 1
        gaps = {later - earlier for earlier, later in pairwise([-1, *places])}
        assert max(gaps) - min(gaps) <= 1
        assert min(gaps) >= 1

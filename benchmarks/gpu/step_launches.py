"""The launches of a step in order, for a model without memory on a simulated GPU."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.dry_card import Launch, dry_card
from benchmarks.gpu.shapes import Config
from benchmarks.gpu.suite import BLOCK_SIZE
from services.worker.backends.torch_lm import TorchLM
from services.worker.engine.device.chunks import prepare_chunks
from services.worker.engine.device.device_slots import DeviceSlots
from services.worker.engine.device.mixed_step import MixedStep
from services.worker.engine.device.segments import Segments
from services.worker.engine.device.stack_experts import stack_experts
from services.worker.engine.device.states import DeviceStatePool
from services.worker.engine.device.steps import DecodeStep
from services.worker.engine.device.trunk_graphs import RecordedTrunk, TrunkShape
from services.worker.layers.embedding import TokenRows
from services.worker.layers.linear import Linear
from services.worker.machine.kv_cache import KVCache
from services.worker.models.registry import find_model
from services.worker.slots.table import SlotTable
from services.worker.startup.model_shape import place_layers, shape_of
from services.worker.step.rows import Rows
from services.worker.weights.load import build_model
from shared.wire.messages import Capacity

Run = Callable[[], None]
META = torch.device("meta")
DTYPE = torch.bfloat16
# torch operators that only make views or uninitialized memory (zeros on the simulated GPU).
NO_LAUNCHES = {"alias", "as_strided", "detach", "empty", "expand", "permute", "select", "slice"}
NO_LAUNCHES |= {"flatten", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind"}
NO_LAUNCHES |= {"_unsafe_view", "empty_like", "new_empty", "new_zeros", "unflatten", "unsqueeze"}
NO_LAUNCHES |= {"view", "zeros_like"}


class Operator(NamedTuple):
    """A torch operator, with the bytes it reads and writes."""

    name: str
    num_bytes: int


def decode_launches(
    config: Config, num_rows: int, max_len: int, *, compiles: bool = False
) -> list[Launch | Operator]:
    """Launches of a step in which ``num_rows`` sequences decode one token each, with room for
    ``max_len`` tokens per sequence."""
    return _launches(decode_step(config, num_rows, max_len), compiles)


def mixed_launches(
    config: Config, num_rows: int, nums: Sequence[int], max_len: int, num_padded: int | None = None
) -> list[Launch | Operator]:
    """Launches of a step with ``num_rows`` decode rows and prompts of ``nums`` tokens, from
    preparation to sampling, without the replay of a graph of ``num_padded`` tokens."""
    return _launches(mixed_step(config, num_rows, nums, max_len, num_padded))


def _launches(run: Run, compiles: bool = False) -> list[Launch | Operator]:
    found: list[Launch | Operator] = []
    # Models are built before torch.empty is patched: torch caches the function for default devices.
    card = dry_card(watch=found.append, compiles=compiles)
    with torch.inference_mode(), card, _Watch(found.append):
        run()
    return found


def decode_step(config: Config, num_rows: int, max_len: int) -> Run:
    segments, _ = _segments(config, num_rows, max_len)
    slots = torch.zeros(num_rows, dtype=torch.int32, device=META)
    return partial(_run, DecodeStep(segments, slots, torch.zeros_like(slots), 1, max_len))


def mixed_step(
    config: Config,
    num_rows: int,
    nums: Sequence[int],
    max_len: int,
    num_padded: int | None = None,
    device: torch.device = META,
) -> Run:
    num_slots, rows, chunks = num_rows + len(nums), np.arange(num_rows), np.arange(len(nums))
    segments, table = _segments(config, num_slots, max_len, device)
    slots = torch.from_numpy(rows).int().to(device)
    zeros = np.zeros_like(chunks)
    planned = Rows(num_rows + chunks, zeros, np.array(nums), zeros, zeros, chunks)
    trunk = None
    if num_padded is not None:
        hidden = torch.empty(num_padded, config["hidden_size"], dtype=DTYPE, device=device)
        trunk = RecordedTrunk(segments, TrunkShape(num_padded, 1), num_slots, max_len, hidden)
        trunk.record(lambda run: _replay_nothing)
    decoding = segments, slots, torch.zeros_like(slots), 1, max_len

    def run() -> None:
        _run(MixedStep(*decoding, prepare_chunks(table, planned, num_rows, device), trunk))

    return run


def _replay_nothing() -> None:
    pass


def _run(step: DecodeStep | MixedStep) -> None:
    step.forward()
    step.sample_and_accept(None)


def _segments(
    config: Config, num_slots: int, max_len: int, device: torch.device = META
) -> tuple[Segments, SlotTable]:
    model = build_model(_read(config), DTYPE, device)
    for module in model.modules():
        if isinstance(module, Linear | TokenRows):
            module.allocate(device)
    stack_experts(model)
    assert model.lm_head is not None
    model.lm_head.to(DTYPE)
    limits = BLOCK_SIZE, num_slots, num_slots, max_len, model.config.vocab_size, 0
    place_layers(model, Capacity(0, *limits), drafts=False)
    shape = shape_of(model, DTYPE, drafts=False)
    capacity = Capacity(0, *limits, groups=shape.groups)
    table = SlotTable(capacity)
    segments = Segments(
        TorchLM(model),
        DeviceSlots(capacity, table, np.zeros(1, np.int64), device).state,
        KVCache(shape.kv_layouts, 0, BLOCK_SIZE, device, shape.layer_groups),
        DeviceStatePool(shape.state_specs, capacity, device),
        torch.zeros(1, dtype=torch.int32, device=device),
        drafts=False,
        returns_processed=False,
    )
    return segments, table


def _read(config: Config) -> Any:
    return msgspec.convert(config, find_model(config["architectures"]).Config)


class _Watch(TorchDispatchMode):
    def __init__(self, tell: Callable[[Operator], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Iterable[type],
        arguments: tuple[Any, ...] = (),
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        out = operator(*arguments, **(options or {}))
        name = operator.overloadpacket.__name__
        if name not in NO_LAUNCHES:
            read = arguments if name in ("mm", "addmm_") else ()
            tensors = [each for each in (out, *read) if isinstance(each, Tensor)]
            self._tell(Operator(name, sum(each.nbytes for each in tensors)))
        return out

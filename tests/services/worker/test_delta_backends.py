"""A layer with a state in both backends, in single steps and in the decode loop."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernels.cpu.decode import DecodeRows, NativeDecoder
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import DTYPES
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import NativeProgram
from kernels.delta.states import LayerStates, StateRows, States
from kernels.paged_attention import prepare_attention
from services.worker.backends.compiler import Compiler
from services.worker.backends.recorder import record
from services.worker.backends.torch_lm import TorchOps
from services.worker.hybrids.delta_hybrid import GatedDelta
from services.worker.hybrids.delta_rows import DeltaSpec
from services.worker.hybrids.mamba import Mamba, MambaOptions
from services.worker.layers.context import ForwardContext, forward_context
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import NotSupported
from services.worker.layers.parallel import ALONE
from services.worker.models.decoder import DecoderLM
from tests.kernels.deltas import INTERVAL, MOST_DRAFTS
from tests.services.worker.builds import each_variant
from tests.services.worker.checkpoints import allocate
from tests.services.worker.test_native import VOCAB_SIZE, make_config, make_model

SPEC = DeltaSpec(num_heads=4, num_key_heads=2, key_dim=32, value_dim=48, width=4)
CHANNELS = 320
HIDDEN = 96
CPU = torch.device("cpu")


class Layers(nn.Module):
    """Embeddings, two layers with a state, and a head."""

    def __init__(self, dtype: torch.dtype, spec: DeltaSpec = SPEC, *, scans: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Mamba(HIDDEN, spec, number, 1e-6, ALONE, options=MambaOptions())
            if scans
            else GatedDelta(HIDDEN, spec, number, 1e-6, ALONE)
            for number in range(2)
        )
        self.norm = RMSNorm(HIDDEN, 1e-6)
        generator = torch.Generator().manual_seed(0)
        allocate(self, CPU)
        for parameter in self.to(dtype).parameters():
            parameter.data.normal_(float(parameter.ndim == 1), 0.2, generator=generator)
        self.lm: DecoderLM = make_model(make_config("Qwen2, biases"), dtype)
        layer: Any
        for place, layer in enumerate(self.layers):
            layer.put_state(place)

    def forward(self, ops: Any, ids: Any) -> Any:
        x = ops.embed(ids, self.lm.model.embed_tokens)
        for layer in self.layers:
            x = layer(ops, x, norm=self.norm, residual=x)
        return x

    def programs(self, library: NativeLibrary) -> tuple[NativeProgram, NativeProgram]:
        names = {module: name for name, module in self.named_modules()}
        trunk = record(names, [1], self.forward)
        head = record(names, [HIDDEN], self.lm.logits)
        compiler = Compiler(self.lm, library)
        return compiler.compile(trunk), compiler.compile(head)


def random_states(num: int, *, scans: bool) -> list[LayerStates]:
    heads, num_gates = SPEC.num_heads, (1 if scans else 2) * SPEC.num_heads
    return [
        LayerStates(
            torch.randn(num, heads, SPEC.key_dim, SPEC.value_dim),
            torch.randn(num, SPEC.width, CHANNELS),
            torch.randn(num, MOST_DRAFTS, CHANNELS + num_gates),
        )
        for _ in range(2)
    ]


def copied(states: list[LayerStates]) -> list[LayerStates]:
    return [LayerStates(*(each.clone() for each in layer)) for layer in states]


def rows_of(nums: list[int], num_kept: list[int], positions: list[int]) -> StateRows:
    """States 0, 1, …, and copies of them in the ones behind."""
    num_rows = len(nums)
    numbers = np.arange(num_rows)
    return StateRows(
        starts=np.cumsum([0, *nums]),
        num_drafts=np.zeros(num_rows, np.int64),
        states=numbers,
        positions=np.array(positions),
        num_kept=np.array(num_kept),
        num_seen=np.zeros(num_rows, np.int64),
        copies=num_rows + numbers,
        interval=INTERVAL,
    )


@each_variant
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scans", [False, True])
@torch.inference_mode()
def test_native_code_computes_layers_like_torch(
    variant: str, dtype: torch.dtype, scans: bool
) -> None:
    torch.manual_seed(0)
    layers, states = Layers(dtype, scans=scans), random_states(6, scans=scans)
    others = copied(states)
    ids = torch.randint(VOCAB_SIZE, (24,), dtype=torch.int32)
    rows = rows_of([1, 20, 3], [2, 0, 1], [4, 0, 7])
    with forward_context(ForwardContext([], [], States(others, rows))):
        expected = layers.forward(TorchOps(), ids)
    trunk, _ = layers.programs(NativeLibrary(load_library(variant), dtype, 2))
    found = trunk.run([ids], states=States(states, rows))
    tolerance = 1e-5 if dtype == torch.float32 else 0.08
    assert apart(found, expected.float()) < tolerance
    for layer, other in zip(states, others, strict=True):
        assert apart(layer.matrices, other.matrices) < tolerance
        assert apart(layer.columns, other.columns) < tolerance


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@each_variant
@pytest.mark.parametrize("scans", [False, True])
@torch.inference_mode()
def test_the_decode_loop_advances_states_as_single_steps_do(variant: str, scans: bool) -> None:
    """One row begins with kept drafts, and all pass a multiple of the interval."""
    torch.manual_seed(0)
    library = NativeLibrary(load_library(variant), torch.float32, 2)
    trunk, head = Layers(torch.float32, scans=scans).programs(library)
    states, num_kept, positions = random_states(6, scans=scans), [2, 0, 0], [9, 14, 15]
    others, first = copied(states), torch.tensor([3, 7, 5], dtype=torch.int32)
    found = decoded(trunk, head, first, states, rows_of([1] * 3, num_kept, positions))
    ids = first.clone()
    for tokens in found:
        hidden = trunk.run([ids], states=States(others, rows_of([1] * 3, num_kept, positions)))
        ids = head.run([hidden]).argmax(1).int()
        assert ids.tolist() == tokens.tolist()
        positions = [sum(each, 1) for each in zip(positions, num_kept, strict=True)]
        num_kept = [0, 0, 0]
    assert len(found) == 8
    for layer, other in zip(states, others, strict=True):
        assert torch.equal(layer.matrices, other.matrices)
        assert torch.equal(layer.columns, other.columns)


def decoded(
    trunk: NativeProgram,
    head: NativeProgram,
    first: Tensor,
    states: list[LayerStates],
    rows: StateRows,
) -> np.ndarray:
    num_rows, slots = len(first), torch.zeros(len(first), dtype=torch.int64)
    ones, tables = np.ones(num_rows, np.int64), np.zeros((num_rows, 4), np.int64)
    attention = prepare_attention(ones, ones.copy(), tables, 16, torch.float32, CPU)
    given = DecodeRows(
        input_ids=first.clone(),
        positions=torch.zeros_like(slots),
        groups=[(slots, attention)],
        kv_caches=[],
        random=None,
        rooms=np.full(num_rows, 100),
        ignores_eos=np.ones(num_rows, bool),
        states=States(states, rows),
    )
    return NativeDecoder(trunk, head, np.zeros(0, np.int64)).run(given, 8)


@pytest.mark.parametrize(
    ("change", "scans", "message"),
    [
        ({"value_dim": 40}, False, "linear_value_head_dim 40 is no multiple of 16"),
        ({"key_dim": 272}, False, "linear_key_head_dim 272 is above 256"),
        ({"width": 9}, False, "linear_conv_kernel_dim 9 is above 8"),
        ({"value_dim": 40}, True, "mamba_d_head or mamba_head_dim 40 is no multiple of 16"),
        ({"key_dim": 272}, True, "mamba_d_state or ssm_state_size 272 is above 256"),
        ({"width": 9}, True, "mamba_d_conv or conv_kernel 9 is above 8"),
    ],
)
def test_heads_that_native_code_cannot_compute_are_refused(
    change: dict[str, int], scans: bool, message: str
) -> None:
    layers = Layers(torch.float32, SPEC._replace(**change), scans=scans)
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1)
    with pytest.raises(NotSupported, match=re.escape(f"the delta rule of state 0: {message}")):
        layers.programs(library)

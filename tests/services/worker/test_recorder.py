"""Hand-written forward passes: native code computes them like torch, or refuses them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import DTYPES
from kernels.cpu.packing import NativeLibrary
from services.worker.backends.compiler import Compiler
from services.worker.backends.recorder import record
from services.worker.backends.torch_lm import TorchOps
from services.worker.layers.linear import Linear
from services.worker.layers.norm import RMSNorm
from services.worker.layers.ops import NotSupported
from services.worker.weights.load import build_model
from tests.services.worker.checkpoints import allocate
from tests.services.worker.test_native import make_config

SIZE, INNER = 64, 96


class Layers(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.into, self.out_of = Linear(SIZE, INNER), Linear(INNER, SIZE)
        self.gate_up = Linear(SIZE, 2 * INNER)
        self.norm, self.inner_norm = RMSNorm(SIZE, 1e-6), RMSNorm(INNER, 1e-6)
        generator = torch.Generator().manual_seed(0)
        allocate(self, torch.device("cpu"))
        for parameter in self.to(dtype).parameters():
            parameter.data.normal_(float(parameter.ndim == 1), 0.1, generator=generator)


Pass = Callable[[Layers, Any, Any], Any]

COMPUTED: dict[str, Pass] = {
    "buffers that are free again": lambda its, ops, x: ops.linear(
        ops.gated(ops.linear(ops.gated(x, its.gate_up), its.out_of), its.gate_up), its.out_of
    ),
    "a sum and its norm": lambda its, ops, x: ops.norm(
        ops.linear(ops.linear(x, its.into), its.out_of, residual=ops.linear(
            ops.linear(x, its.into, norm=its.norm), its.out_of)), its.norm
    ),
    "factors": lambda its, ops, x: ops.scale(
        ops.linear(ops.linear(x, its.into, scale=3.0), its.out_of, scale=0.5), -2.0
    ),
    "a norm that is added": lambda its, ops, x: ops.norm(
        ops.linear(ops.linear(x, its.into), its.out_of), its.norm, residual=ops.norm(x, its.norm)
    ),
    "gates of a gated product": lambda its, ops, x: ops.linear(
        ops.gate(ops.gated(x, its.gate_up), ops.linear(x, its.into, norm=its.norm)), its.out_of
    ),
}  # fmt: skip


def stale(its: Layers, ops: Any, x: Any) -> Any:
    inner = ops.linear(x, its.into)
    ops.scale(inner, 3.0)
    return inner


REFUSED: dict[str, tuple[Pass, str]] = {
    "a norm of gates": (
        lambda its, ops, x: ops.norm(ops.gated(x, its.gate_up), its.inner_norm),
        "inner_norm: output of a gate or attention",
    ),
    "a product with a norm of gates": (
        lambda its, ops, x: ops.linear(ops.gated(x, its.gate_up), its.out_of, norm=its.inner_norm),
        "out_of: output of a gate or attention",
    ),
    "scaled gates": (
        lambda its, ops, x: ops.scale(ops.gated(x, its.gate_up), 2.0),
        "the input of a scale: output of a gate or attention",
    ),
    "gates of a wide input": (
        lambda its, ops, x: ops.gate(ops.norm(x, its.norm), x),
        "the input of gates: not the output of a gate or attention",
    ),
    "gates of another size": (
        lambda its, ops, x: ops.gate(ops.gated(x, its.gate_up), x),
        "gates: 64 elements per token, expected 96",
    ),
    "gates as the result": (
        lambda its, ops, x: ops.gated(x, its.gate_up),
        "the output of a pass: output of a gate or attention",
    ),
    "inputs of another size": (
        lambda its, ops, x: ops.linear(x, its.out_of),
        "out_of: 64 elements per token, expected 96",
    ),
    "a residual of another size": (
        lambda its, ops, x: ops.linear(x, its.into, residual=ops.norm(x, its.norm)),
        "into: 64 elements per token, expected 96",
    ),
    "what was changed": (stale, "the output of a pass: its value before an addition"),
    "what was given, changed": (
        lambda its, ops, x: ops.scale(x, 2.0),
        "the input of a scale: an input of the pass must stay",
    ),
    "what was given, beside work": (
        lambda its, ops, x: (ops.linear(x, its.into), x)[1],
        "a pass returns its input",
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", COMPUTED)
def test_a_pass_matches_torch(name: str, dtype: torch.dtype) -> None:
    found, expected = both(COMPUTED[name], dtype)
    distance = (found - expected).norm() / expected.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.02)


def both(run: Pass, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Native code's and torch's results for seven tokens."""
    x = torch.randn(7, SIZE, generator=torch.Generator().manual_seed(1))
    layers = Layers(dtype)
    with torch.inference_mode():
        expected = run(layers, TorchOps(), x.to(dtype)).float()
        recording = record(names_of(layers), [SIZE], lambda ops, x: run(layers, ops, x))
        model = build_model(make_config("Qwen2, biases"), dtype, torch.device("cpu"))
        library = NativeLibrary(load_library(variants()[0]), dtype, 2)
        return Compiler(model, library).compile(recording).run([x]), expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_further_inputs_are_added_as_by_torch(dtype: torch.dtype) -> None:
    """The second and third; there is no fourth."""
    given = torch.randn(3, 7, SIZE, generator=torch.Generator().manual_seed(1))
    layers = Layers(dtype)

    def run(ops: Any, x: Any, *_: Any) -> Any:
        for number in (2, 1, 3):
            x = ops.linear(ops.linear(x, layers.into, norm=layers.norm), layers.out_of, residual=x)
            x = ops.add_input(x, number)
        return x

    with torch.inference_mode():
        inputs = given.to(dtype, copy=True).unbind()
        expected = run(TorchOps(inputs=inputs), inputs[0]).float()
        alone = run(TorchOps(), given[0].to(dtype, copy=True)).float()
        recording = record(names_of(layers), [SIZE] * 3, run, takes_over=True)
        model = build_model(make_config("Qwen2, biases"), dtype, torch.device("cpu"))
        library = NativeLibrary(load_library(variants()[0]), dtype, 2)
        found = Compiler(model, library).compile(recording).run(given.unbind())
    distance = (found - expected).norm() / expected.norm()
    assert distance < (1e-5 if dtype == torch.float32 else 0.02)
    assert (alone - expected).norm() > 0.5 * expected.norm()


def names_of(layers: Layers) -> dict[nn.Module, str]:
    return {module: name for name, module in layers.named_modules()}


@pytest.mark.parametrize("name", REFUSED)
def test_a_pass_that_native_code_would_get_wrong_is_refused_with_the_reason(name: str) -> None:
    run, reason = REFUSED[name]
    layers = Layers(torch.float32)
    with pytest.raises(NotSupported, match=f"^{reason}"):
        record(names_of(layers), [SIZE], lambda ops, x: run(layers, ops, x))

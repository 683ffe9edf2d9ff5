"""Every backend computes an option of attention and a form of weights, or refuses it by name."""

import zlib
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import load_library, variants
from kernels.cpu.packing import NativeLibrary
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import DEVICE, TorchLM
from services.worker.layers.heads import AttentionSpec
from services.worker.layers.ops import NotSupported
from services.worker.models import CausalLM, parts
from services.worker.models.decoder import DecoderLM
from services.worker.startup.choose_backend import choose_kernels
from services.worker.weights.load import build_model
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from tests.services.worker.checkpoints import allocate
from tests.services.worker.device_contexts import OnDevice
from tests.services.worker.test_native import furthest, make_config, random_prompts, run

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

CPU, DTYPE = torch.device("cpu"), torch.float32
CONFIG = make_config("Qwen2, biases")
SETTINGS = WorkerConfig(native_kernels=False, num_threads=1)
REFUSED = NotSupported, ConfigError
# A value for every field of AttentionSpec with a default.
VALUES: dict[str, list[Any]] = {
    "norm": ["heads", "tokens"],
    "is_interleaved": [True],
    "window": [5],
    "softcap": [0.5],
    "has_sinks": [True],
    "is_causal": [],  # changes images alone, see tests/services/worker/media/test_gemma4.py
}
UNKNOWN: set[tuple[str, str]] = set()  # backends and the options they refuse


def by_native_code(model: DecoderLM) -> CausalLM:
    return NativeLM(model, 16, NativeLibrary(load_library(variants()[0]), DTYPE, 1))


def by_torch(model: DecoderLM) -> CausalLM:
    return choose_kernels(model, SETTINGS, DTYPE)[0]


def on_a_device(model: DecoderLM) -> CausalLM:
    return OnDevice(TorchLM(model, DEVICE))


BACKENDS: dict[str, Callable[[DecoderLM], CausalLM]] = {
    "native": by_native_code,
    "torch": by_torch,
    "device": on_a_device,
}


@dataclass(frozen=True, slots=True)
class WiderSpec(AttentionSpec):
    unheard_of: float = 0.0


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., DecoderLM]:
    """Makes a model with the given attention options; weights depend only on parameter names."""

    def build(kind: type[AttentionSpec] = AttentionSpec, **options: Any) -> DecoderLM:
        monkeypatch.setattr(parts, "AttentionSpec", lambda **values: kind(**(values | options)))
        model = build_model(CONFIG, DTYPE, CPU)
        allocate(model, CPU)
        for name, parameter in model.named_parameters():
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            mean, std = float(name.endswith("norm.weight")), 0.2 if parameter.ndim == 1 else 0.12
            parameter.normal_(mean, std, generator=generator)
        return model

    return build


def logits(backend: str, model: DecoderLM) -> list[Tensor]:
    return run(BACKENDS[backend](model), CONFIG, DTYPE, random_prompts(1, 9, 40), 17)


def why_refused(backend: str, model: DecoderLM) -> str:
    try:
        BACKENDS[backend](model)
    except REFUSED as problem:
        return str(problem)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_option_changes_the_logits_as_with_torch_or_is_refused_by_name(
    backend: str, build: Callable[..., DecoderLM], subtests: pytest.Subtests
) -> None:
    """A new field of AttentionSpec belongs into VALUES, and into the backends that support it."""
    plain = logits(backend, build())
    for name in [field.name for field in fields(AttentionSpec) if field.default is not MISSING]:
        for value in VALUES[name]:
            with subtests.test(f"{name} = {value}"):
                expected = logits("torch", build(**{name: value}))
                assert furthest(expected, plain) > 0.01
                reason = why_refused(backend, build(**{name: value}))
                assert bool(reason) == ((backend, name) in UNKNOWN), reason
                if reason:
                    assert f"options {name}" in reason
                else:
                    found = logits(backend, build(**{name: value}))
                    assert furthest(found, expected) < 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_option_that_nobody_taught_a_backend_is_refused_by_name(
    backend: str, build: Callable[..., DecoderLM]
) -> None:
    logits(backend, build(WiderSpec))  # it is not set
    with pytest.raises(REFUSED, match="options unheard_of"):
        BACKENDS[backend](build(WiderSpec, unheard_of=0.5))

"""Integer weights with activations rounded to 8 bits."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from kernels.codes import Codes
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import LANES, Kind, Operator
from kernels.cpu.packing import NativeLibrary, can_round, gate_up_order, packed_form
from kernels.cpu.program import Buffer, NativeProgram
from services.worker.backends.native import NativeLM
from services.worker.weights.codes import INT4, pack_pairs
from services.worker.weights.load import quantize
from services.worker.weights.online import (
    Quantization,
    quantize_int4,
    quantize_int8,
    quantize_nf4,
)
from shared.errors import ConfigError
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams
from tests.services.worker.test_native import (
    EXPERTS,
    experts_of,
    furthest,
    make_config,
    make_model,
    run,
)
from tests.services.worker.test_native import random_prompts as native_prompts


def with_zeros(n: int, k: int, group: int) -> Codes:
    """Four bits, with an integer zero for each group, as in GPTQ and AWQ."""
    codes = torch.randint(0, 16, (n, k), dtype=torch.uint8)
    groups = -(-k // group)
    zeros = torch.randint(-8, 8, (n, groups)).float()
    return Codes(pack_pairs(codes), torch.rand(n, groups), zeros, INT4, k, group, first=-8.0)


FORMS = {
    "wint8": lambda n, k: quantize_int8(torch.randn(n, k)).as_codes,
    "wint4": lambda n, k: quantize_int4(torch.randn(n, k)).as_codes,
    "int8 in groups of 128": lambda n, k: Codes(
        torch.randint(-128, 128, (n, k), dtype=torch.int8),
        torch.rand(n, -(-k // 128)), None, None, k, 128,
    ),
    "zeros in groups of 64": lambda n, k: with_zeros(n, k, 64),
    "zeros in groups of 16": lambda n, k: with_zeros(n, k, 16),
}  # fmt: skip


def rounding(form: str) -> list[str]:
    """The variants that round for ``form``."""
    packed = packed_form(FORMS[form](16, 256))
    return [name for name in variants() if can_round(load_library(name), packed)]


def some_builds_round(form: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not rounding(form), reason="this CPU lacks AVX512-VNNI")


ROUNDED = [pytest.param(form, marks=some_builds_round(form)) for form in FORMS]


def rounded(x: Tensor, group: int) -> Tensor:
    """Rows [..., k] rounded by ``activation-dtype: int8``."""
    groups = functional.pad(x, (0, -x.shape[-1] % group)).unflatten(-1, (-1, group))
    most = groups.abs().amax(-1, keepdim=True)
    factor = torch.where(most > 0, torch.tensor(127.0) / most, 0)
    return ((groups * factor).round() * (most / 127)).flatten(-2)[..., : x.shape[-1]]


def multiply(
    variant: str, codes: Codes, x: Tensor, dtype: torch.dtype, kind: Kind, **options: Any
) -> Tensor:
    """By a program that rounds: x [num, k] float32 → the result of ``kind``."""
    library = NativeLibrary(load_library(variant), dtype, 2, rounds=True)
    n, k = codes.shape
    order = gate_up_order(n // 2) if kind == Kind.GATED else None
    packed = library.pack_codes(codes, None, order)
    assert packed.rounds
    operators = [
        Operator(kind=Kind.NARROW, source=0, out=1, size=k),
        Operator(kind=kind, source=1, out=2, size=k, weight=packed, **options),
    ]
    outputs = n // 2 if kind == Kind.GATED else n
    sizes = [(k, torch.float32), (k, dtype), (outputs, dtype)]
    if kind == Kind.LINEAR:
        sizes[2] = (n, torch.float32)
        return NativeProgram(library, operators, [Buffer(*each) for each in sizes], 1, 2).run([x])
    # The output of gates is narrow: widened by a GEMM with the identity.
    wide = library.pack(torch.eye(outputs))
    operators.append(Operator(kind=Kind.LINEAR, source=2, out=3, size=outputs, weight=wide))
    sizes.append((outputs, torch.float32))
    return NativeProgram(library, operators, [Buffer(*each) for each in sizes], 1, 3).run([x])


def rounding_group(codes: Codes) -> int:
    return min(128, codes.group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ROUNDED)
def test_products_match_rounded_rows(form: str, dtype: torch.dtype) -> None:
    for n, k, num in ((96, 64, 1), (37, 272, 7), (80, 1040, 33), (16, 16, 70), (130, 384, 4)):
        codes, x = FORMS[form](n, k), torch.randn(num, k).to(dtype).float()
        truth = codes.values(torch.float64)
        expected = rounded(x, rounding_group(codes)).double() @ truth.T
        scale = (x.double().abs() @ truth.abs().T).max()
        for variant in rounding(form):
            found = multiply(variant, codes, x, dtype, Kind.LINEAR)
            assert (found - expected).abs().max() < 1e-6 * scale
            exact = x.double() @ truth.T
            assert (found - exact).abs().max() > 1e-5 * scale


@pytest.mark.parametrize("form", ROUNDED)
def test_gates_match_rounded_rows(form: str) -> None:
    codes, x = FORMS[form](64, 96), torch.randn(9, 96)
    truth = codes.values(torch.float64)
    gate, up = (rounded(x, rounding_group(codes)).double() @ truth.T).chunk(2, -1)
    scale = (x.double().abs() @ truth.abs().T).max()  # scale of float32's rounding in sums
    allowed = 1e-6 * scale * (gate.abs() + up.abs() + 1)
    for variant in rounding(form):
        found = multiply(variant, codes, x, torch.float32, Kind.GATED)
        assert ((found - functional.silu(gate) * up).abs() <= allowed).all()


@pytest.mark.parametrize("form", ROUNDED)
def test_a_row_is_the_same_alone(form: str) -> None:
    codes, x = FORMS[form](100, 1040), torch.randn(75, 1040)
    for variant in rounding(form):
        together = multiply(variant, codes, x, torch.bfloat16, Kind.LINEAR)
        for row in (0, 1, 6, 64, 74):
            alone = multiply(variant, codes, x[row : row + 1], torch.bfloat16, Kind.LINEAR)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("form", ROUNDED)
def test_builds_have_the_same_bits(form: str) -> None:
    if len(rounding(form)) == 1:
        pytest.skip("this CPU runs one build")
    codes, x = FORMS[form](100, 1040), torch.randn(9, 1040)
    first, *others = (
        multiply(variant, codes, x, torch.bfloat16, Kind.LINEAR) for variant in rounding(form)
    )
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_spoils_its_row_alone(bad: float) -> None:
    codes, x = FORMS["wint4"](3 * LANES, 96), torch.randn(4, 96)
    expected = multiply(variants()[0], codes, x, torch.float32, Kind.LINEAR)
    x[2, 40] = bad
    found = multiply(variants()[0], codes, x, torch.float32, Kind.LINEAR)
    assert found[2].isnan().all()
    others = [0, 1, 3]
    assert torch.equal(found[others], expected[others])


def test_codes_that_are_no_whole_numbers_are_multiplied_with_numbers() -> None:
    library = NativeLibrary(load_library(variants()[0]), torch.float32, 1, rounds=True)
    assert not library.pack_codes(quantize_nf4(torch.randn(16, 64)).as_codes).rounds


def texts(prompts: Sequence[list[int]], **settings: Any) -> list[list[int]]:
    engine = make_engine(EMBEDDED_MODEL, "native", **settings)
    params = SamplingParams(seed=0, temperature=0.7, max_tokens=24, ignore_eos=True)
    found: list[list[int]] = scheduled.run(engine, prompts, params).texts
    return found


@pytest.mark.parametrize("form", ROUNDED[:2])
def test_texts_are_the_same_with_drafts_in_chunks_and_alone(form: str) -> None:
    prompts = [list(range(7 + i, 60 + 5 * i)) for i in range(12)]
    settings: dict[str, Any] = {"quantization": form, "dtype": "bfloat16"}
    rounding = settings | {"activation_dtype": "int8"}
    none = {"speculative_config": {"method": "none"}}
    expected = texts(prompts, **rounding, **none)
    assert texts(prompts, **rounding, max_num_batched_tokens=39) == expected
    assert texts(prompts[:1], **rounding) == expected[:1]
    assert texts(prompts, **settings, **none) != expected


@pytest.mark.parametrize("quantization", ROUNDED[:2])
@pytest.mark.parametrize("variant", variants())
def test_experts_multiply_rounded_rows_too(variant: str, quantization: Quantization) -> None:
    """A token alone and among others: little precision is lost, and the bits are equal."""
    if variant not in rounding(quantization):
        pytest.skip("this build lacks AVX512-VNNI")
    config, dtype = make_config(EXPERTS), torch.bfloat16

    def logits(chunk_size: int, **options: bool) -> list[Tensor]:
        model = make_model(config, dtype)
        for mixture in experts_of(model):
            for each in mixture.products:
                quantize(each.gate_up_proj, quantization)
                quantize(each.down_proj, quantization)
        library = NativeLibrary(load_library(variant), dtype, 2, **options)
        native = NativeLM(model, 16, library)
        return run(native, config, dtype, native_prompts(60, 9, 1), chunk_size)

    exact, expected = logits(1000), logits(1000, rounds=True)
    assert 1e-3 < furthest(expected, exact, Tensor.mean) < 0.1
    for found in (logits(1, rounds=True), logits(7, rounds=True)):
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({}, "no weights of it are whole numbers"),
        ({"quantization": "nf4"}, "no weights of it are whole numbers"),
        pytest.param(
            {"quantization": "wint8"},
            "this CPU lacks AVX512-VNNI",
            marks=pytest.mark.skipif(bool(rounding("wint8")), reason="this CPU has AVX512-VNNI"),
        ),
        ({"quantization": "wint8", "native_kernels": False}, "native-kernels is off"),
    ],
)
def test_unroundable_forms_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=f"activation-dtype: int8 .*{problem}"):
        make_engine(EMBEDDED_MODEL, "native", activation_dtype="int8", **settings)


def test_the_engine_of_gpus_refuses_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="activation-dtype: int8 is for native code on a CPU"):
        make_engine(EMBEDDED_MODEL, "device", activation_dtype="int8", quantization="wint8")

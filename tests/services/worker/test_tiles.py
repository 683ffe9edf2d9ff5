"""AMX GEMMs, by the same sources with its instructions emulated in C++: tested on CPUs without AMX
too."""

import ctypes

import pytest
import torch

from kernels.codes import Codes
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import Kind, Operator, PackedMatrix
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from services.worker.backends.native import NativeLM
from services.worker.backends.torch_lm import TorchLM
from services.worker.weights.online import ONLINE, Quantization
from tests.kernels.coded import KINDS, random_codes
from tests.kernels.test_adapt import assert_alike_in_any_batch, assert_close, draw, expected, native
from tests.services.worker import tiles
from tests.services.worker.test_native import furthest, make_config, random_prompts, run
from tests.services.worker.test_weight_forms import in_float32, in_form

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

DTYPE = torch.bfloat16
NAMES = ("Qwen2, biases", "Llama, sixteen queries a key")


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    return NativeLibrary(ctypes.CDLL(str(tiles.compiled())), DTYPE, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("quantization", ["none", *ONLINE])
def test_logits_are_nearer_to_float32_than_torchs(
    library: NativeLibrary, name: str, quantization: Quantization
) -> None:
    """The inner sizes are no multiples of 32, and the steps have one row, some, and many."""
    config, prompts = make_config(name), random_prompts(1, 17, 130, 400)
    exact = run(
        TorchLM(in_float32(in_form(quantization, name, DTYPE))), config, torch.float32, prompts, 300
    )
    torchs = run(TorchLM(in_form(quantization, name, DTYPE)), config, DTYPE, prompts, 300)
    native = NativeLM(in_form(quantization, name, DTYPE), 16, library)
    found = run(native, config, DTYPE, prompts, 300)
    assert furthest(found, exact, torch.Tensor.mean) < furthest(torchs, exact, torch.Tensor.mean)


@pytest.mark.parametrize("quantization", ["none", *ONLINE])
def test_a_tokens_logits_are_the_same_bits_whatever_shares_its_step(
    library: NativeLibrary, quantization: Quantization
) -> None:
    name = "ERNIE, interleaved, biases everywhere"
    config, prompts = make_config(name), random_prompts(100, 35, 1, 9)
    model = NativeLM(in_form(quantization, name, DTYPE), 16, library)
    expected = run(model, config, DTYPE, prompts, 1000)
    for chunk_size in (1, 7, 16, 33):
        found = run(model, config, DTYPE, prompts, chunk_size)
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True)), chunk_size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("group", "has_zeros"), [(16, True), (32, False), (32, True), (128, True), (None, True)]
)
def test_codes_in_groups_have_the_same_bits_in_any_batch(
    library: NativeLibrary, kind: str, group: int | None, has_zeros: bool
) -> None:
    """Single rows, some, as many as the registers hold, and more; the last group is short."""
    weight = random_codes(kind, (70, 528), group, zeros=has_zeros)
    program = product_with(library, library.pack_codes(weight))
    x = torch.randn(300, 528).bfloat16()
    found = program.run([x.float()])
    exact = x.double() @ weight.values(torch.float32).double().T
    rounding = 2**-7 if kind == "table" else 1e-5  # its values are not exact in bfloat16
    assert (found - exact).abs().max() <= rounding * exact.abs().max()
    for num in (1, 2, 16, 17, 33):
        parts = torch.cat([program.run([rows]) for rows in x.float().split(num)])
        assert torch.equal(parts, found), num


def product_with(library: NativeLibrary, packed: PackedMatrix) -> NativeProgram:
    """Rows in float32, which are narrowed first."""
    narrow = Operator(kind=Kind.NARROW, source=0, out=1, size=packed.k)
    product = Operator(kind=Kind.LINEAR, source=1, out=2, size=packed.k, weight=packed)
    sizes = [(packed.k, torch.float32), (packed.k, DTYPE), (packed.n, torch.float32)]
    buffers = [Buffer(size, dtype) for size, dtype in sizes]
    return NativeProgram(library, [narrow, product], buffers, 1, 2)


@pytest.mark.parametrize("is_int8", [False, True])
def test_small_numbers_are_zeros_whatever_shares_the_product(
    library: NativeLibrary, is_int8: bool
) -> None:
    """Operands and sums around the smallest normal float32, 1.2e-38."""
    libraries = [library]
    if "amx" in variants():
        libraries.append(NativeLibrary(load_library("amx"), DTYPE, 1))
    generator = torch.Generator().manual_seed(1)
    size = 80
    x = torch.randn(3, size, generator=generator) * torch.logspace(-40, -34, size)
    weight = torch.randn(size, size, generator=generator) * torch.logspace(-3, 0, size)
    for each in libraries:
        if is_int8:
            codes = (weight * 127).clamp(-127, 127).to(torch.int8)
            packed = each.pack_codes(Codes(codes, torch.ones(size, 1), None, None, size, size))
        else:
            packed = each.pack(weight)
        program = product_with(each, packed)
        alone = torch.cat([program.run([row]) for row in x.split(1)])
        assert torch.equal(alone, program.run([x]))
        assert (alone != 0).sum() > 0


def test_deltas_of_adapters(library: NativeLibrary) -> None:
    for num_tokens in (1, 2, 5, 17, 70):
        given = draw(num_tokens, DTYPE, num_tokens)
        assert_close(native(library, given), expected(given, DTYPE), given, DTYPE)
    assert_alike_in_any_batch(library)

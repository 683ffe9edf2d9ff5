"""GEMMs of native code with dense and quantized weights, at the edges of its blocks of rows and
parts of the summed dimension."""

import pytest
import torch
from torch import Tensor

from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import Kind, Operator, PackedMatrix
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from tests.kernels.coded import KINDS, random_codes

pytestmark = pytest.mark.usefixtures("_unwritten_memory")

OUTPUTS, INPUTS, ROWS = 70, 528, 300  # 528 = 2 · 256 + 16: the last part is short
GROUPS = ((16, True), (32, False), (128, True), (None, False))
BATCHES = (1, 2, 3, 5, 6, 7, 12, 13, 64, 65, 129)


def multiply(library: NativeLibrary, packed: PackedMatrix, x: Tensor, num: int) -> Tensor:
    """x in float32, `num` rows at a time."""
    operators = [
        Operator(kind=Kind.NARROW, source=0, out=1, size=INPUTS),
        Operator(kind=Kind.LINEAR, source=1, out=2, size=INPUTS, weight=packed),
    ]
    sizes = [(INPUTS, torch.float32), (INPUTS, library.dtype), (OUTPUTS, torch.float32)]
    buffers = [Buffer(size, dtype) for size, dtype in sizes]
    program = NativeProgram(library, operators, buffers, 1, 2)
    return torch.cat([program.run([rows]).clone() for rows in x.split(num)])


@pytest.mark.parametrize("variant", variants())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("kind", "group", "has_zeros"),
    [("dense", None, False), *((kind, *each) for kind in KINDS for each in GROUPS)],
)
def test_a_row_has_the_same_bits_in_any_batch(
    kind: str, group: int | None, has_zeros: bool, dtype: torch.dtype, variant: str
) -> None:
    library = NativeLibrary(load_library(variant), dtype, 2)
    if kind == "dense":
        weight = torch.randn(OUTPUTS, INPUTS).to(dtype)
        packed, values = library.pack(weight), weight
    else:
        codes = random_codes(kind, (OUTPUTS, INPUTS), group, zeros=has_zeros)
        packed, values = library.pack_codes(codes), codes.values(torch.float32)
    x = torch.randn(ROWS, INPUTS).to(dtype).float()
    found = multiply(library, packed, x, ROWS)
    exact = x.double() @ values.double().T
    is_rounded = kind == "table" and dtype == torch.bfloat16  # values of a table become bfloat16
    rounding = 2**-7 if is_rounded else 1e-5
    assert (found - exact).abs().max() <= rounding * exact.abs().max()
    for num in BATCHES:
        assert torch.equal(multiply(library, packed, x, num), found), num

"""Deltas of adapters: torch's operators and each build of the native code against the reference."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.adapt import Change, adapt
from kernels.adapt import reference as adapt_reference
from kernels.adapt.layout import lay_out
from kernels.cpu.adapt import AdaptedRows, PackedAdapt
from kernels.cpu.adapter import PackedAdapter, adapter_bytes
from kernels.cpu.library import load_library, variants
from kernels.cpu.operators import DTYPES, Kind, Operator
from kernels.cpu.packing import NativeLibrary, gate_up_order
from kernels.cpu.program import Buffer, NativeProgram
from kernels.silu_mul import Act, num_parts, silu_mul

INPUTS, OUTPUTS = 96, 80
RANKS = (1, 4, 8, 16, 64)
# First output and number of outputs of each piece: all, the middle alone, and odd numbers.
PIECES = ([(0, 48), (48, 16), (64, 16)], [(48, 16)], [(0, 5), (7, 30), (61, 19)])
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}  # of A x, which is rounded


class Given(NamedTuple):
    x: Tensor
    y: Tensor
    adapters: np.ndarray
    changes: list[list[Change]]


def draw(num_tokens: int, dtype: torch.dtype, seed: int = 0, size: int = OUTPUTS) -> Given:
    """Adapters of all ranks and pieces, one of them without changes; their tokens are mixed."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    changes = [
        [
            Change(first, (numbers(rank, INPUTS) / 10).to(dtype), (numbers(n, rank) / 10).to(dtype))
            for first, n in pieces
        ]
        for rank in RANKS
        for pieces in PIECES
    ]
    changes.append([])
    adapters = np.random.default_rng(seed).integers(-1, len(changes), num_tokens)
    if num_tokens > 8:
        adapters[2:6] = 1  # adjacent tokens, unless more are drawn
    return Given(numbers(num_tokens, INPUTS), numbers(num_tokens, size), adapters, changes)


def native(
    library: NativeLibrary, given: Given, scale: float = 1.0, *, adds: bool = True
) -> Tensor:
    """The given y with the deltas, or the deltas alone."""
    rows = AdaptedRows(len(given.changes))
    for index, each in enumerate(given.changes):
        rows.bind(index, PackedAdapter([[], each]))
    rows.lay_out(lay_out(given.adapters))
    size = given.y.shape[1]
    own = PackedAdapt(rows, 1, size)
    operators = [
        Operator(kind=Kind.NARROW, source=0, out=2, size=INPUTS),
        Operator(kind=Kind.ADAPT, source=2, out=1, size=INPUTS, adds=adds, scale=scale, adapt=own),
    ]
    buffers = [
        Buffer(INPUTS, torch.float32),
        Buffer(size, torch.float32),
        Buffer(INPUTS, library.dtype),
    ]
    return NativeProgram(library, operators, buffers, 2, 1).run([given.x, given.y.clone()])


@pytest.fixture(params=variants())
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def expected(given: Given, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    rows, of_tokens = given.x.to(dtype), torch.from_numpy(given.adapters)
    return adapt_reference.adapt(given.y, rows, of_tokens, given.changes, scale)


def assert_close(found: Tensor, wanted: Tensor, given: Given, dtype: torch.dtype) -> None:
    """Rows without adapters are unchanged."""
    assert (found - wanted).abs().max() < TOLERANCE[dtype]
    is_plain = torch.from_numpy(given.adapters < 0)
    assert torch.equal(found[is_plain], given.y[is_plain])
    if any(given.changes[index] for index in given.adapters if index >= 0):
        assert (wanted - given.y).abs().max() > 10 * TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33, 70])
def test_torch_computes_the_reference(num_tokens: int, dtype: torch.dtype) -> None:
    given = draw(num_tokens, dtype)
    y, of_tokens = given.y.clone(), torch.from_numpy(given.adapters)
    adapt(y, given.x.to(dtype), of_tokens, given.changes, -0.5)
    assert_close(y, expected(given, dtype, -0.5), given, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_native_code_computes_the_reference(
    variant: str, dtype: torch.dtype, num_threads: int
) -> None:
    library = NativeLibrary(load_library(variant), dtype, num_threads)
    for num_tokens in range(1, 71):
        given = draw(num_tokens, dtype, num_tokens)
        scale = (1.0, -0.5)[num_tokens % 2]
        found = native(library, given, scale)
        assert_close(found, expected(given, dtype, scale), given, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(variant: str, dtype: torch.dtype) -> None:
    assert_alike_in_any_batch(NativeLibrary(load_library(variant), dtype, 2))


def assert_alike_in_any_batch(library: NativeLibrary) -> None:
    given = draw(70, library.dtype)
    given.adapters[20:60] = 3  # more rows than a pass, adjacent ones among others
    whole = native(library, given)
    for token in range(70):
        part = slice(token, token + 1)
        alone = given._replace(x=given.x[part], y=given.y[part], adapters=given.adapters[part])
        assert torch.equal(native(library, alone)[0], whole[token])
    rows = np.arange(15, 52)
    some = given._replace(x=given.x[rows], y=given.y[rows], adapters=given.adapters[rows])
    assert torch.equal(native(library, some), whole[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_stored_deltas_are_zero_where_nothing_changes(variant: str, dtype: torch.dtype) -> None:
    library = NativeLibrary(load_library(variant), dtype, 1)
    given = draw(40, dtype)
    given.y.fill_(torch.nan)
    found = native(library, given, adds=False)
    zeros = given._replace(y=torch.zeros_like(given.y))
    is_adapted = torch.from_numpy(given.adapters >= 0)
    wanted = expected(zeros, dtype)[is_adapted]
    assert (found[is_adapted] - wanted).abs().max() < TOLERANCE[dtype]
    assert torch.equal(found[is_adapted] == 0, wanted == 0)
    assert found[~is_adapted].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", ["silu", "relu2"])
def test_gates_and_ups_get_deltas_before_the_activation(
    variant: str, dtype: torch.dtype, act: Act
) -> None:
    library, outputs = NativeLibrary(load_library(variant), dtype, 1), 96
    size = outputs // num_parts(act)
    pieces = [(0, 48), (48, 48)], [(48, 48)]
    given = draw(30, dtype, size=outputs)
    changes = [
        [
            Change(first, torch.randn(8, INPUTS).to(dtype), torch.randn(n, 8).to(dtype))
            for first, n in each
        ]
        for each in pieces
    ]
    given = given._replace(changes=changes, adapters=np.arange(30) % 3 - 1)
    weight = torch.randn(outputs, INPUTS).to(dtype) / 8
    rows = AdaptedRows(2)
    for index, each in enumerate(changes):
        rows.bind(index, PackedAdapter([each]))
    own = PackedAdapt(rows, 0, outputs)
    packed = library.pack(weight, None, gate_up_order(size) if act == "silu" else None)
    unit = library.pack(torch.eye(size))
    operators = [
        Operator(kind=Kind.NARROW, source=0, out=2, size=INPUTS),
        Operator(kind=Kind.ADAPT, source=2, out=3, size=INPUTS, adapt=own),
        Operator(
            kind=Kind.GATED,
            source=2,
            out=4,
            second=3,
            size=INPUTS,
            act=act,
            weight=packed,
            adapt=own,
        ),
        # A product with the identity makes it wide.
        Operator(kind=Kind.LINEAR, source=4, out=1, size=size, weight=unit),
    ]
    sizes = [(INPUTS, torch.float32), (size, torch.float32), (INPUTS, dtype)]
    buffers = [Buffer(*each) for each in (*sizes, (outputs, torch.float32), (size, dtype))]
    program = NativeProgram(library, operators, buffers, 1, 1)

    plain = program.run([given.x]).clone()
    rows.lay_out(lay_out(given.adapters))
    found = program.run([given.x]).clone()
    rows.lay_out(None)
    assert torch.equal(program.run([given.x]), plain)

    narrow = given.x.to(dtype)
    products = narrow.float() @ weight.float().T
    adapt(products, narrow, torch.from_numpy(given.adapters), changes)
    wanted = silu_mul(products, act)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    assert (found - wanted).abs().max() < tolerance * wanted.abs().max()
    is_plain = torch.from_numpy(given.adapters < 0)
    assert torch.equal(found[is_plain], plain[is_plain])
    assert not torch.isclose(found[~is_plain], plain[~is_plain]).all(1).any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_matrices_are_packed_like_weights(dtype: torch.dtype) -> None:
    """The A of a site as one weight."""
    library = NativeLibrary(load_library(variants()[-1]), dtype, 1)
    for changes in draw(1, dtype).changes[:-1]:
        turned = [each._replace(a=each.a.T.contiguous().T) for each in changes]
        ranks = [-(-len(each.a) // 16) * 16 for each in changes]
        all_a = torch.zeros(sum(ranks), INPUTS)
        all_b = [torch.zeros(len(each.b), rank) for each, rank in zip(changes, ranks, strict=True)]
        for number, each in enumerate(changes):
            first, rank = sum(ranks[:number]), len(each.a)
            all_a[first : first + rank], all_b[number][:, :rank] = each.a, each.b
        for adapter in (PackedAdapter([changes]), PackedAdapter([turned])):
            (site,) = adapter.sites
            assert site.a is not None
            for matrix, weight in zip([site.a, *site.each], [all_a, *all_b], strict=True):
                packed = library.pack(weight.to(dtype))
                assert (matrix.n, matrix.k) == (packed.n, packed.k)
                assert torch.equal(matrix.tiles, packed.tiles)
            sizes = [
                adapter_bytes(len(each.a), INPUTS, len(each.b), dtype.itemsize) for each in changes
            ]
            assert adapter.num_bytes == sum(sizes)


def test_a_layout_is_sorted_by_adapter() -> None:
    layout = lay_out(np.array([2, -1, 0, 2, 0, -1, 2]))
    segments: Sequence[tuple[int, list[int]]] = [
        (index, tokens.tolist()) for index, tokens in layout.segments()
    ]
    assert segments == [(0, [2, 4]), (2, [0, 3, 6])]
    assert layout.num_tokens == 7

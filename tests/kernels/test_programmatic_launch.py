"""Programmatic dependent launches of the engine, on simulated GPUs: the kernels' operations before
they wait, which a run on a GPU would not reliably show."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from benchmarks.gpu.dry_card import AMPERE, HOPPER, Launch, dry_card
from benchmarks.gpu.sass import read_code
from benchmarks.gpu.shapes import QWEN3_8B, TINY
from benchmarks.gpu.step_launches import Operator, decode_launches
from kernels import switches
from kernels.codes import Codes
from kernels.linear import gated, linear
from services.worker.weights.online import ONLINE, Quantization
from tests.kernels.compiled import needs_compiler

# The first test of a step compiles its kernels.
pytestmark = [needs_compiler, pytest.mark.timeout(300)]
MAX_LEN = 256
WAIT, LET_NEXT_BEGIN = "ACQBULK", "PREEXIT"
TOUCHES = ("LD.", "LDG", "LDGSTS", "ST.", "STG", "ATOM", "RED", "UBLKCP", "UTMA", "MEMBAR")
DEPENDENT = [
    *("rms_norm_kernel", "linear_kernel", "rope_kv_kernel", "decode_kernel", "linear_kernel"),
    *("rms_norm_kernel", "gated_kernel", "linear_kernel"),
]
META = torch.device("meta")


@pytest.fixture(autouse=True)
def _dependent_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "DEPENDENT_LAUNCHES", True)


def launched(num_rows: int) -> list[Launch | Operator]:
    return decode_launches(TINY, num_rows, MAX_LEN, compiles=True)


def assert_waits_first(launch: Launch) -> None:
    """No program exits, loads or stores before it waits, and none lets the next launch begin."""
    names = [each.name for each in read_code(launch.model.cubin)]
    (wait,) = (index for index, name in enumerate(names) if name.startswith(WAIT))
    before, behind = names[:wait], names[wait:]
    assert not [name for name in before if name.startswith((*TOUCHES, LET_NEXT_BEGIN, "EXIT"))]
    assert [name for name in behind if name.startswith(TOUCHES)]
    assert sum(name.startswith(LET_NEXT_BEGIN) for name in behind) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 40])
def test_a_layer_begins_early_and_waits_before_it_touches_memory(num_rows: int) -> None:
    launches = [each for each in launched(num_rows) if isinstance(each, Launch)]
    early = [each for each in launches if each.is_dependent]
    names = [each.model.name for each in early]
    head = ["rms_norm_kernel", "linear_kernel"]
    assert names == DEPENDENT * TINY["num_hidden_layers"] + head
    for launch in {each.model.cubin: each for each in early}.values():
        assert_waits_first(launch)
    for launch in launches:
        is_there = any(each.name.startswith(WAIT) for each in read_code(launch.model.cubin))
        assert is_there == launch.is_dependent, launch.model.name


@pytest.mark.parametrize(
    ("num_tokens", "form"),
    [
        *((1, "none"), (64, "wint4")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                (64, "none"),
                (1, "wint4"),
                (1, "wint8"),
                (64, "wint8"),
                (1, "nf4"),
                (64, "nf4"),
            )
        ),
    ],
)
def test_gemms_of_weights_in_codes_wait_first(num_tokens: int, form: Quantization) -> None:
    found = list(products(num_tokens, form))
    assert [each.is_dependent for each in found] == [True, True]
    for launch in found:
        assert launch.model.num_stack_bytes == 0
        assert_waits_first(launch)


def products(num_tokens: int, form: Quantization, arch: int = HOPPER) -> Iterator[Launch]:
    """The o, gate and up GEMMs of Qwen3-8B."""
    hidden, inner = QWEN3_8B["hidden_size"], QWEN3_8B["intermediate_size"]
    found: list[Launch] = []
    with dry_card(arch, found.append):
        for num_rows, operator in ((hidden, linear), (2 * inner, gated)):
            x = torch.empty(num_tokens, hidden, dtype=torch.bfloat16, device=META)
            operator(x, weight_of(num_rows, hidden, form))
    yield from found


def weight_of(num_rows: int, size: int, form: Quantization) -> Tensor | Codes:
    if form == "none":
        return torch.empty(num_rows, size, dtype=torch.bfloat16, device=META)
    few = ONLINE[form](torch.randn(16, size).bfloat16()).as_codes
    codes, scales = (
        torch.empty(num_rows, each.shape[1], dtype=each.dtype, device=META)
        for each in (few.codes, few.scales)
    )
    return few._replace(codes=codes, scales=scales)


def test_cards_that_cannot_do_it_wait_as_ever() -> None:
    found = [*products(1, "none", AMPERE)]
    assert [each.is_dependent for each in found] == [False, False]
    for launch in found:
        assert not [each for each in read_code(launch.model.cubin) if each.name.startswith(WAIT)]


def test_without_the_switch_nothing_begins_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "DEPENDENT_LAUNCHES", False)
    found = [*products(1, "none")]
    assert [each.is_dependent for each in found] == [False, False]

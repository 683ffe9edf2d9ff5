"""The order of programs in the interpreter."""

import torch
import triton
import triton.language as tl


@triton.jit
def _write_number(out) -> None:
    tl.store(out, tl.program_id(0) * 4 + tl.program_id(1))


@triton.jit
def _count(out) -> None:
    tl.store(out + tl.program_id(0) * 4 + tl.program_id(1), 1)


def test_the_last_program_is_not_always_the_same_one() -> None:
    out, last = torch.zeros(1, dtype=torch.int32), set()
    for _ in range(20):
        _write_number[(3, 4)](out)
        last.add(int(out))
    assert len(last) > 5


def test_each_program_runs() -> None:
    out = torch.zeros(12, dtype=torch.int32)
    _count[(3, 4)](out)
    assert out.tolist() == [1] * 12

"""Quantized weights of every kind."""

from typing import Any

import torch
from torch import Tensor

from kernels.codes import Codes, first_of

# Values of 4-bit codes: the integers -8 … 7, or a table.
TABLES = {"counted": torch.arange(-8.0, 8.0), "table": torch.linspace(-1, 1, 16) ** 3}
KINDS = ("int8", "fp8", *TABLES)


def random_codes(
    kind: str,
    shape: tuple[int, int],
    group: int | None = None,
    *,
    zeros: bool = False,
    order: bool = False,
    device: torch.device | str = "cpu",
) -> Codes:
    """Codes of roughly normal values; ``group`` None: one scale per output."""
    num_rows, size = shape
    group = size if group is None else group
    num_groups = -(-size // group)
    scales = torch.rand(num_rows, num_groups) + 0.5
    table = TABLES.get(kind)
    if kind == "int8":
        codes, scales = torch.randint(-128, 128, shape).to(torch.int8), scales / 74
    elif kind == "fp8":
        codes = torch.randn(shape).mul_(100).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes.view(torch.uint8)[:, 0] = torch.arange(num_rows) % 8  # denormals
        scales = scales / 100
    else:
        codes = torch.randint(0, 256, (num_rows, -(-size // 2))).to(torch.uint8)
        scales = scales / (4.6 if kind == "counted" else 0.4)
    found = Codes(
        codes,
        scales,
        torch.randint(-3, 4, scales.shape).bfloat16() if zeros else None,
        table,
        size,
        group,
        torch.randperm(size) if order else None,
        first_of(table),
    )
    moved: Any = [each.to(device) if isinstance(each, Tensor) else each for each in found]
    return Codes(*moved)

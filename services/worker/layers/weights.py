"""The forms that a GEMM's weights [outputs, inputs] may have."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from kernels.codes import Codes, first_of


def empty_parameter(
    *shape: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=device), requires_grad=False)


class Dense(nn.Module):
    """The numbers themselves. They are made empty: the loader fills every one or raises."""

    def __init__(
        self,
        outputs: int,
        inputs: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.values = empty_parameter(outputs, inputs, dtype=dtype, device=device)

    def rows(self, ids: Tensor) -> "Dense":
        """A copy of the outputs ``ids`` [n] int64."""
        values = self.values
        taken = Dense(len(ids), values.shape[1], values.dtype, values.device)
        taken.values.copy_(values[ids])
        return taken


class Quantized(nn.Module):
    """Codes, and the scales of their values.

    ``codes`` of eight bits [outputs, inputs], int8 or float8_e4m3fn, are values themselves. Codes
    of four bits are two in a byte, the first one in its lower half: [outputs, ⌈inputs / 2⌉] uint8,
    indices into a ``table`` [16] of values. In each output, each ``group`` of adjacent inputs has
    one of ``scales`` [outputs, groups], and of ``zeros`` [outputs, groups], if there are any, which
    are subtracted before scaling. They are kept as bfloat16 if that is exact, else as float32.
    The i-th code belongs to input ``order[i]``, or i.

    ``dtype`` is the model's, and the dtype of ``values``. Raises ValueError if the shapes do not
    match.
    """

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        *,
        dtype: torch.dtype,
        inputs: int,
        group: int,
        table: Tensor | None = None,
        zeros: Tensor | None = None,
        order: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.dtype, self.group = dtype, group
        self.shape = torch.Size((len(codes), inputs))
        self.codes = nn.Parameter(codes.contiguous(), requires_grad=False)
        self.scales = nn.Parameter(_narrowed(scales), requires_grad=False)
        self.zeros: Tensor | None
        self.table: Tensor | None
        self.order: Tensor | None
        self.register_buffer("zeros", None if zeros is None else _narrowed(zeros))
        self.register_buffer("table", table)
        self.register_buffer("order", order)
        self._first = first_of(table)
        if codes.shape[1] != -(-inputs // self.codes_per_place):
            raise ValueError(f"codes {list(codes.shape)} for {inputs} inputs")
        num_groups = -(-inputs // group)
        for name, each in (("scales", scales), ("zeros", zeros)):
            if each is not None and each.shape != (len(codes), num_groups):
                found = f"{name} {list(each.shape)}"
                raise ValueError(f"{found} for {len(codes)} outputs with {num_groups} groups")

    @property
    def codes_per_place(self) -> int:
        return 1 if self.table is None else 2

    @property
    def as_codes(self) -> Codes:
        """The codes for kernels."""
        return Codes(
            *(self.codes, self.scales, self.zeros, self.table),
            *(self.shape[1], self.group, self.order, self._first),
        )

    @property
    def values(self) -> Tensor:
        """The dequantized weight [outputs, inputs], computed anew."""
        return self.as_codes.values(self.dtype)

    def part(self, dim: int, start: int, num: int) -> "Quantized | None":
        """``num`` outputs (``dim`` 0) or inputs (1) from ``start`` on, or None if these begin or
        end within one of several groups, or a byte."""
        if num == self.shape[dim]:
            return self
        end, inputs = start + num, self.shape[1]
        if dim == 0:
            rows = slice(start, end)
            return self._with(self.codes[rows], inputs, lambda each: each[rows])
        unit = self.group if self.group < inputs else self.codes_per_place
        cuts = start % unit or (end % unit and end < inputs)
        if cuts or self.order is not None:
            return None
        groups = slice(start // self.group, -(-end // self.group))
        places = slice(start // self.codes_per_place, -(-end // self.codes_per_place))
        return self._with(self.codes[:, places], num, lambda each: each[:, groups])

    def rows(self, ids: Tensor) -> "Quantized":
        """A copy of the outputs ``ids`` [n] int64."""
        return self._with(self.codes[ids], self.shape[1], lambda each: each[ids])

    def _with(self, codes: Tensor, inputs: int, cut: Callable[[Tensor], Tensor]) -> "Quantized":
        """Has other codes, and the scales and zeros after ``cut``."""
        return Quantized(
            codes,
            cut(self.scales),
            dtype=self.dtype,
            inputs=inputs,
            group=self.group if self.group < self.shape[1] else inputs,
            table=self.table,
            zeros=None if self.zeros is None else cut(self.zeros),
            order=self.order,
        )


Weight = Dense | Quantized


def are_alike(parts: Sequence[Quantized]) -> bool:
    """True if ``parts`` differ only in their outputs."""
    first = parts[0]
    kind = (first.codes.dtype, first.shape[1], first.group)
    return all(
        (each.codes.dtype, each.shape[1], each.group) == kind
        and _are_same(each.table, first.table)
        and _are_same(each.order, first.order)
        for each in parts
    )


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Returns the outputs of all ``parts``, which differ only in their outputs."""
    first = parts[0]
    zeros = None
    if any(each.zeros is not None for each in parts):
        zeros = torch.cat([_zeros_of(each).float() for each in parts])
    return Quantized(
        torch.cat([each.codes for each in parts]),
        torch.cat([each.scales.float() for each in parts]),
        dtype=first.dtype,
        inputs=first.shape[1],
        group=first.group,
        table=first.table,
        zeros=zeros,
        order=first.order,
    )


def stack(parts: Sequence[Weight]) -> None:
    """Makes ``parts`` of one shape adjacent in memory, for ``stack_of``. Raises ValueError if they
    are not in one form."""
    dense = [each for each in parts if isinstance(each, Dense)]
    coded = [each for each in parts if isinstance(each, Quantized)]
    if len(dense) == len(parts):
        for each, part in zip(dense, torch.stack([each.values for each in dense]), strict=True):
            each.values = nn.Parameter(part, requires_grad=False)
        return
    if len({_kind(each) for each in parts}) > 1 or not all(
        _are_same(each.table, coded[0].table) for each in coded
    ):
        raise ValueError("weights of experts that are not in one form")
    _stack_codes(coded)


def stack_of(first: Weight, num: int) -> Tensor | Codes:
    """Returns a view [num, …] of ``first`` and the weights stacked after it."""
    if isinstance(first, Dense):
        return adjacent(first.values, num)
    codes = first.as_codes
    zeros, order = (
        None if each is None else adjacent(each, num) for each in (codes.zeros, codes.order)
    )
    return codes._replace(
        codes=adjacent(codes.codes, num),
        scales=adjacent(codes.scales, num),
        zeros=zeros,
        order=order,
    )


def adjacent(first: Tensor, num: int) -> Tensor:
    """Returns a view [num, …] of ``first`` and the tensors after it in memory."""
    return first.as_strided((num, *first.shape), (first.numel(), *first.stride()))


def _kind(weight: Weight) -> tuple[object, ...]:
    """The common properties of all codes that one kernel decodes, except the table."""
    if isinstance(weight, Dense):
        return ()
    return weight.codes.dtype, weight.shape, weight.group, weight.order is None


def _stack_codes(parts: Sequence[Quantized]) -> None:
    codes = torch.stack([each.codes for each in parts])
    scales = _narrowed(torch.stack([each.scales.float() for each in parts]))
    zeros: Sequence[Tensor | None] = [None] * len(parts)
    if any(each.zeros is not None for each in parts):
        zeros = list(_narrowed(torch.stack([_zeros_of(each).float() for each in parts])))
    for each, own_codes, own_scales, own_zeros in zip(parts, codes, scales, zeros, strict=True):
        each.codes = nn.Parameter(own_codes, requires_grad=False)
        each.scales = nn.Parameter(own_scales, requires_grad=False)
        each.zeros = own_zeros
    orders = [each.order for each in parts if each.order is not None]
    if orders:
        for each, order in zip(parts, torch.stack(orders), strict=True):
            each.order = order


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _zeros_of(weight: Quantized) -> Tensor:
    return torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros


def _narrowed(numbers: Tensor) -> Tensor:
    wide, narrow = numbers.float(), numbers.bfloat16()
    return (narrow if torch.equal(narrow.float(), wide) else wide).contiguous()

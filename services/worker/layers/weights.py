"""The forms that a product's weights [outputs, inputs] may have."""

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


class Quantized(nn.Module):
    """Codes, and scales that what they stand for is multiplied with.

    ``codes`` of eight bits [outputs, inputs], int8 or float8_e4m3fn, stand for themselves. Those of
    four bits are two in a byte, the first one in its lower half: [outputs, ⌈inputs / 2⌉] uint8,
    places in a ``table`` [16] of numbers. Of an output each ``group`` of neighbours has one of
    ``scales`` [outputs, groups], and of ``zeros`` [outputs, groups], if there are any, which are
    taken from the numbers before. They are kept as bfloat16 where that is exact, else as float32.
    The i-th code is that of input ``order[i]``, or i.

    ``dtype`` is that of the model, in which ``values`` come. Raises ValueError where the shapes do
    not go together.
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
        """As kernels take it."""
        return Codes(
            *(self.codes, self.scales, self.zeros, self.table),
            *(self.shape[1], self.group, self.order, self._first),
        )

    @property
    def values(self) -> Tensor:
        """What it stands for [outputs, inputs], computed anew."""
        return self.as_codes.values(self.dtype)

    def part(self, dim: int, start: int, num: int) -> "Quantized | None":
        """``num`` outputs (``dim`` 0) or inputs (1) from ``start`` on, or None where these begin or
        end within a group."""
        if num == self.shape[dim]:
            return self
        end, inputs = start + num, self.shape[1]
        if dim == 0:
            rows = slice(start, end)
            return self._with(self.codes[rows], inputs, lambda each: each[rows])
        cuts_groups = start % self.group or (end % self.group and end < inputs)
        if cuts_groups or self.order is not None:
            return None
        groups = slice(start // self.group, -(-end // self.group))
        places = slice(start // self.codes_per_place, -(-end // self.codes_per_place))
        return self._with(self.codes[:, places], num, lambda each: each[:, groups])

    def _with(self, codes: Tensor, inputs: int, cut: Callable[[Tensor], Tensor]) -> "Quantized":
        """Has other codes, and of scales and zeros what ``cut`` leaves."""
        return Quantized(
            codes,
            cut(self.scales),
            dtype=self.dtype,
            inputs=inputs,
            group=self.group,
            table=self.table,
            zeros=None if self.zeros is None else cut(self.zeros),
            order=self.order,
        )


Weight = Dense | Quantized


def are_alike(parts: Sequence[Quantized]) -> bool:
    """Whether ``parts`` differ in nothing but outputs."""
    first = parts[0]
    kind = (first.codes.dtype, first.shape[1], first.group)
    return all(
        (each.codes.dtype, each.shape[1], each.group) == kind
        and _are_same(each.table, first.table)
        and _are_same(each.order, first.order)
        for each in parts
    )


def joined(parts: Sequence[Quantized]) -> Quantized:
    """Returns the outputs of all ``parts``, which are alike."""
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


def stacked(parts: Sequence[Weight]) -> Tensor | Codes:
    """Puts ``parts`` of one shape into one [E, …], of which each is left with its part. Raises
    ValueError where they are not in one form."""
    dense = [each for each in parts if isinstance(each, Dense)]
    coded = [each for each in parts if isinstance(each, Quantized)]
    if len(dense) == len(parts):
        values = torch.stack([each.values for each in dense])
        for each, part in zip(dense, values, strict=True):
            each.values = nn.Parameter(part, requires_grad=False)
        return values
    if len({_kind(each) for each in parts}) > 1 or not all(
        _are_same(each.table, coded[0].table) for each in coded
    ):
        raise ValueError("weights of experts that are not in one form")
    return _stacked_codes(coded)


def _kind(weight: Weight) -> tuple[object, ...]:
    """What is the same in all codes that one kernel decodes, but for the table."""
    if isinstance(weight, Dense):
        return ()
    return weight.codes.dtype, weight.shape, weight.group, weight.order is None


def _stacked_codes(parts: Sequence[Quantized]) -> Codes:
    whole = parts[0].as_codes
    zeros = order = None
    if any(each.zeros is not None for each in parts):
        zeros = _narrowed(torch.stack([_zeros_of(each).float() for each in parts]))
    if parts[0].order is not None:
        order = torch.stack([each.order for each in parts if each.order is not None])
    whole = whole._replace(
        codes=torch.stack([each.codes for each in parts]),
        scales=_narrowed(torch.stack([each.scales.float() for each in parts])),
        zeros=zeros,
        order=order,
    )
    for index, each in enumerate(parts):
        part = whole.expert(index)
        each.codes = nn.Parameter(part.codes, requires_grad=False)
        each.scales = nn.Parameter(part.scales, requires_grad=False)
        each.zeros, each.order = part.zeros, part.order
    return whole


def _are_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _zeros_of(weight: Quantized) -> Tensor:
    return torch.zeros_like(weight.scales) if weight.zeros is None else weight.zeros


def _narrowed(numbers: Tensor) -> Tensor:
    wide, narrow = numbers.float(), numbers.bfloat16()
    return (narrow if torch.equal(narrow.float(), wide) else wide).contiguous()

"""Packs weights for the native library's GEMMs."""

import ctypes

import numpy as np
import torch
from torch import Tensor

from kernels.codes import Codes
from kernels.cpu.memory import Arena
from kernels.cpu.operators import LANES, Form, PackedMatrix, packed_depth, whole_tiles
from kernels.cpu.pointers import address, array_address

# Group sizes of native code; a larger group becomes several with equal scales.
GROUPS = (128, 64, 32, 16)
FORMS = {
    torch.uint8: Form.GROUPED_INT4,
    torch.int8: Form.GROUPED_INT8,
    torch.float8_e4m3fn: Form.GROUPED_FP8,
}


class NativeLibrary:
    """The functions of a library for weights of one type, ``DTYPES``.

    With ``rounds``, activations are quantized to 8 bits before a GEMM with integer weights, if
    the library ``can_round`` for their form.
    """

    def __init__(
        self, library: ctypes.CDLL, dtype: torch.dtype, num_threads: int, *, rounds: bool = False
    ) -> None:
        name = str(dtype).removeprefix("torch.")
        self.dtype = dtype
        self._rounds = [form for form in Form if rounds and can_round(library, form)]
        self._arena = Arena()
        self._pack = {
            torch.float32: library["shoal_pack_float32"],
            dtype: library[f"shoal_pack_{name}"],
            torch.int8: library["shoal_pack_int8"],
            torch.float8_e4m3fn: library["shoal_pack_int8"],
            torch.uint8: library["shoal_pack_int4"],
        }
        self.run = library[f"shoal_run_{name}"]
        self.decode = library[f"shoal_decode_{name}"]
        library["shoal_start"](num_threads)

    def pack(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        order: np.ndarray | None = None,
        dtype: torch.dtype | None = None,
    ) -> PackedMatrix:
        """weight [n, k], bias [n]; ``order`` [n] int64: the source row of each output. ``dtype`` is
        the library's or float32."""
        n, k = weight.shape
        order = np.arange(n) if order is None else order
        tiles = self._tiles(weight.to(dtype or self.dtype), order, k)
        return PackedMatrix(tiles, _in_order(bias, order), n, k)

    def pack_codes(
        self, codes: Codes, bias: Tensor | None = None, order: np.ndarray | None = None
    ) -> PackedMatrix:
        """Packs a quantized weight, whose inputs keep their order. Raises ValueError with the
        reason of ``why_not_packed``."""
        if why := why_not_packed(codes.inputs, codes.group):
            raise ValueError(why)
        n, k = len(codes.codes), codes.inputs
        order = np.arange(n) if order is None else order
        tiles = self._tiles(codes.codes, order, k)
        bias = _in_order(bias, order)
        num_groups = codes.scales.shape[1]
        form = packed_form(codes)
        rounds = form in self._rounds and is_whole(codes)
        if form == Form.INT8:
            scales = _in_order(codes.scales[:, 0], order)
            return PackedMatrix(tiles, bias, n, k, form, scales, rounds=rounds)
        group = next(size for size in GROUPS if num_groups == 1 or codes.group % size == 0)
        parts = [each for each in (codes.scales, codes.zeros) if each is not None]
        dtype = (
            torch.float32 if any(each.dtype == torch.float32 for each in parts) else torch.bfloat16
        )
        tiled = [_in_tiles(each, order, codes.group, group, k).to(dtype) for each in parts]
        scales = self._kept(torch.cat(tiled))
        table = None if codes.table is None else self._kept(_wide_and_narrow(codes.table))
        return PackedMatrix(tiles, bias, n, k, form, scales, group, len(parts) == 2, table, rounds)

    def _tiles(self, numbers: Tensor, order: np.ndarray, k: int) -> Tensor:
        numbers = numbers.contiguous()
        depth = packed_depth(k, numbers.dtype.itemsize)
        num_columns = whole_tiles(len(order))
        per_place = -(-k // numbers.shape[1])
        tiles = self._arena.empty(num_columns * depth // per_place, numbers.dtype)
        pack = self._pack[numbers.dtype]
        pack(address(numbers), array_address(order), len(order), k, address(tiles))
        return tiles

    def _kept(self, tensor: Tensor) -> Tensor:
        kept: Tensor = self._arena.empty(tensor.numel(), tensor.dtype)
        kept.copy_(tensor.flatten())
        return kept


def packed_form(codes: Codes) -> Form:
    if codes.codes.dtype == torch.int8 and codes.num_groups == 1 and codes.zeros is None:
        return Form.INT8
    return FORMS[codes.codes.dtype]


def can_round(library: ctypes.CDLL, form: Form) -> bool:
    return bool(library["shoal_can_round"](int(form)))


def is_whole(codes: Codes) -> bool:
    """True if the weight's values are integers in −128 … 127 or −8 … 7, so that activations may be
    rounded."""
    return codes.first == -8 or codes.codes.dtype == torch.int8


def why_not_packed(inputs: int, group: int) -> str | None:
    """The reason why native code cannot read codes with this group size, or None."""
    if inputs % LANES:
        return f"{inputs} inputs are no multiple of {LANES}"
    if group < inputs and group % LANES:
        return f"groups of {group} inputs are no multiple of {LANES}"
    return None


def _in_tiles(numbers: Tensor, order: np.ndarray, group: int, size: int, k: int) -> Tensor:
    """values [n, groups] for groups of ``group`` inputs → flat [tiles][groups][LANES] for groups of
    ``size``."""
    columns = torch.zeros(whole_tiles(len(order)), -(-k // size), dtype=numbers.dtype)
    each = numbers.repeat_interleave(max(1, -(-min(group, k) // size)), 1)
    columns[: len(order)] = each[torch.from_numpy(order), : columns.shape[1]]
    return columns.view(-1, LANES, columns.shape[1]).transpose(1, 2).flatten()


def _wide_and_narrow(table: Tensor) -> Tensor:
    """table [16] → [32] float32: the float32 table, then the table twice in bfloat16."""
    narrow = table.to(torch.bfloat16).repeat(2).view(torch.float32)
    return torch.cat([table.float(), narrow])


def _in_order(tensor: Tensor | None, order: np.ndarray) -> Tensor | None:
    """tensor [n] in float32"""
    return None if tensor is None else tensor.float()[torch.from_numpy(order)].contiguous()


def gate_up_order(size: int) -> np.ndarray:
    """Row order that interleaves gates and ups tile by tile: [2 · size]."""
    tiles = np.arange(2 * size).reshape(2, -1, LANES)
    return np.ascontiguousarray(tiles.swapaxes(0, 1)).ravel()

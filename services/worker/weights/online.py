"""Forms that dense weights are brought into as a model is loaded."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from services.worker.layers.embedding import Embedding, LMHead
from services.worker.layers.weights import Quantized
from services.worker.weights.codes import INT4, NF4, pack_pairs
from shared.errors import ConfigError

Quantization = Literal["none", "wint8", "wint4", "nf4", "fp8", "fp8_block"]


class Forms(NamedTuple):
    """The forms of a model's linear layers, of its output head and of its embeddings."""

    linear: Quantization = "none"
    head: Quantization = "none"
    embedding: Quantization = "none"

    def __str__(self) -> str:
        others = {"head": self.head, "embedding": self.embedding}
        named = [f"-{name}-{form}" for name, form in others.items() if form != "none"]
        return "".join([self.linear, *named])

    def of(self, layer: nn.Module) -> Quantization:
        if isinstance(layer, LMHead):
            return self.head
        return self.embedding if isinstance(layer, Embedding) else self.linear

    def tied(self, is_tied: bool) -> "Forms":
        """With an output head that shares the embeddings' weights, the head gets the embeddings'
        codes, if any. Raises ConfigError if the head is to have other codes."""
        if not is_tied or self.embedding == "none":
            return self
        if self.head not in ("none", self.embedding):
            raise ConfigError(
                f"lm-head-quantization: {self.head}: the output head has the embeddings' weights,"
                f" of which embedding-quantization makes {self.embedding}: leave it out"
            )
        return self._replace(head=self.embedding)


class KnownCodes:
    """The codes that dense weights were brought into at an earlier start; here there are none."""

    def __init__(self, folder: Path, model: Path, dtype: torch.dtype, forms: Forms) -> None:
        """Of the weights that ``model`` holds now, kept in ``folder``."""

    def read(self) -> Mapping[str, Quantized]:
        """Returns the codes by the paths of their layers in the model."""
        return {}

    def write(self, model: nn.Module) -> None:
        """Keeps all codes of ``model``."""


DENSE = Forms()
MAX_INT8 = 127
MAX_FP8 = torch.finfo(torch.float8_e4m3fn).max
INT4_GROUP = 32
TRIED_SHARES = (0.92, 0.84)  # of a scale
NF4_GROUP = 64
FP8_BLOCK = 128
ROWS_AT_ONCE = 1024  # are quantized, in float32; a multiple of FP8_BLOCK


def quantize_int8(dense: Tensor) -> Quantized:
    """Returns whole numbers −127 … 127 with a scale for each output, so that the largest of them is
    the largest number of ``dense``."""
    scales = _above_zero(dense.abs().amax(1, keepdim=True).float() / MAX_INT8)
    codes = _by_rows(lambda some, by: (some / by).round_().to(torch.int8), dense, scales)
    return Quantized(codes, scales, dtype=dense.dtype, inputs=dense.shape[1], group=dense.shape[1])


def quantize_fp8(dense: Tensor) -> Quantized:
    """Returns codes of eight bits (e4m3) with a scale for each output, so that the largest code is
    the largest e4m3 value."""
    scales = _above_zero(dense.abs().amax(1, keepdim=True).float() / MAX_FP8)
    codes = _by_rows(_as_fp8, dense, scales)
    return Quantized(codes, scales, dtype=dense.dtype, inputs=dense.shape[1], group=dense.shape[1])


def quantize_fp8_block(dense: Tensor) -> Quantized:
    """Returns the same with a scale for each block of 128 outputs and 128 inputs, as DeepSeek-V3
    has them (arXiv 2412.19437)."""
    outputs, inputs = dense.shape
    padded = functional.pad(dense.float(), (0, -inputs % FP8_BLOCK, 0, -outputs % FP8_BLOCK))
    blocks = padded.unflatten(1, (-1, FP8_BLOCK)).unflatten(0, (-1, FP8_BLOCK))
    largest = blocks.abs().amax((1, 3))
    scales = _above_zero(largest / MAX_FP8).repeat_interleave(FP8_BLOCK, 0)[:outputs]
    by = scales.repeat_interleave(FP8_BLOCK, 1)[:, :inputs]
    codes = _by_rows(_as_fp8, dense, by)
    return Quantized(codes, scales, dtype=dense.dtype, inputs=inputs, group=FP8_BLOCK)


def quantize_int4(dense: Tensor) -> Quantized:
    """Returns integers −8 … 7 with a scale in bfloat16 for each 32 inputs, positive or negative, so
    that the value farthest from 0 is −8; or a part of that scale, if it saves more squared
    error in rounding than it adds by clipping that value.

    llama.cpp's Q4_0 has the same values, with scales in float16.
    """
    parts = [_int4_rows(rows) for rows in dense.split(ROWS_AT_ONCE)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return _four_bits(codes, scales, INT4, INT4_GROUP, dense)


def quantize_nf4(dense: Tensor) -> Quantized:
    """Returns the nearest of the sixteen values of NF4 (arXiv 2305.14314), −1 … 1, with a scale in
    bfloat16 for each 64 inputs: about the value farthest from 0."""
    parts = [_nf4_rows(rows) for rows in dense.split(ROWS_AT_ONCE)]
    codes, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    return _four_bits(codes, scales, NF4, NF4_GROUP, dense)


ONLINE: dict[Quantization, Callable[[Tensor], Quantized]] = {
    "wint8": quantize_int8,
    "wint4": quantize_int4,
    "nf4": quantize_nf4,
    "fp8": quantize_fp8,
    "fp8_block": quantize_fp8_block,
}


def _above_zero(scales: Tensor) -> Tensor:
    return scales.clamp_(min=torch.finfo(torch.float32).tiny)


def _by_rows(code: Callable[[Tensor, Tensor], Tensor], dense: Tensor, by: Tensor) -> Tensor:
    """Returns the codes of ``dense`` [outputs, inputs] with scales that go with it."""
    pairs = zip(dense.split(ROWS_AT_ONCE), by.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([code(some.float(), scales) for some, scales in pairs])


def _as_fp8(values: Tensor, scales: Tensor) -> Tensor:
    units = values / scales
    return units.clamp_(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


def _four_bits(
    codes: Tensor, scales: Tensor, table: Tensor, group: int, dense: Tensor
) -> Quantized:
    """codes [outputs, groups · group] uint8"""
    return Quantized(
        pack_pairs(codes[:, : dense.shape[1]]),
        scales,
        dtype=dense.dtype,
        inputs=dense.shape[1],
        group=group,
        table=table.to(dense.device),
    )


def _in_groups(rows: Tensor, group: int) -> Tensor:
    """[rows, groups, group] float32"""
    padded = functional.pad(rows.float(), (0, -rows.shape[1] % group))
    return padded.view(len(rows), -1, group)


def _nf4_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales for some rows."""
    groups = _in_groups(rows, NF4_GROUP)
    scales = groups.abs().amax(2, keepdim=True).bfloat16()
    units = groups / torch.where(scales == 0, 1, scales.float())
    table = NF4.to(rows.device)
    borders = (table[1:] + table[:-1]) / 2
    return torch.bucketize(units, borders).to(torch.uint8).flatten(1), scales.squeeze(2)


def _int4_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes and scales for some rows."""
    groups = _in_groups(rows, INT4_GROUP)
    farthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scales = (farthest / -8).bfloat16()
    codes, errors = _int4_codes(groups, scales)
    for share in TRIED_SHARES:
        tried = (farthest * (share / -8)).bfloat16()
        tried_codes, tried_errors = _int4_codes(groups, tried)
        is_better = tried_errors < errors
        scales, codes = tried.where(is_better, scales), tried_codes.where(is_better, codes)
        errors = errors.minimum(tried_errors)
    return codes.add_(8).to(torch.uint8).flatten(1), scales.squeeze(2)


def _int4_codes(groups: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the codes of groups [outputs, groups, group] with scales [outputs, groups, 1], and
    the sum of each group's squared errors."""
    units = torch.where(scales == 0, 1, scales.float())
    codes = (groups / units).round_().clamp_(-8, 7)
    return codes, (codes * units).sub_(groups).square_().sum(2, keepdim=True)

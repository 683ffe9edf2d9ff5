"""The interface of a scheme of quantized weights, and helpers that several schemes share."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from services.worker.layers.weights import Dense, Quantized, Weight
from services.worker.weights.checkpoint import StoredTensor
from services.worker.weights.codes import INT4, pack_pairs
from shared.errors import ConfigError

Stored = Mapping[str, StoredTensor]


class Scheme(ABC):
    """Reads the quantized layers of a checkpoint; the others are dense.

    ``suffixes`` are the endings of the tensor names of a quantized layer, required and optional
    ones. Made from the model's quantization_config; raises ValueError for an unsupported value.
    """

    suffixes: ClassVar[tuple[str, ...]]

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def __str__(self) -> str:
        return str(self.config["quant_method"])

    def ignores(self, tensor: StoredTensor) -> bool:
        """True if ``tensor``, which belongs to no layer, is allowed."""
        return False

    def cache_dtype(self) -> str:
        """The checkpoint's type of the KV cache, as a value of ``kv-cache-dtype``. Raises
        ConfigError for a type without a value there."""
        return "none"

    def num_bytes(self, tensors: Iterable[StoredTensor], dtype: torch.dtype) -> int:
        """The bytes of all ``tensors`` in memory, in a model of ``dtype``."""
        return sum(each.num_bytes for each in tensors)

    @abstractmethod
    def holds(self, stored: Stored) -> bool:
        """True if a layer with these tensors, by their suffixes, is quantized."""

    @abstractmethod
    def shape(self, stored: Stored) -> list[int]:
        """Returns [outputs, inputs] of a quantized layer. Raises KeyError for a missing suffix."""

    @abstractmethod
    def read(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> Weight:
        """``dtype`` is the model's. Tensors that do not match may raise any error of torch."""


@dataclass(frozen=True, slots=True)
class StoredCodes:
    """A quantized ``layer`` of a checkpoint, before anything of it is read."""

    layer: str
    scheme: Scheme
    tensors: Stored

    @property
    def file(self) -> Path:
        return next(iter(self.tensors.values())).file

    @property
    def label(self) -> str:
        """The beginning of an error message, before the shape."""
        return f"layer {self.layer} is quantised and"

    @property
    def shape(self) -> list[int]:
        """[outputs, inputs]. Raises ConfigError if a tensor is missing."""
        with self._said():
            return self.scheme.shape(self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    def read(self, dtype: torch.dtype) -> Weight:
        """Raises ConfigError if a tensor is missing, or tensors do not match."""
        with self._said():
            whole = {suffix: tensor.read_all() for suffix, tensor in self.tensors.items()}
            return self.scheme.read(whole, dtype)

    @contextmanager
    def _said(self) -> Iterator[None]:
        try:
            yield
        except KeyError as suffix:
            raise ConfigError(
                f"model: {self.file.parent} lacks {self.layer}.{suffix.args[0]}"
            ) from None
        except torch.OutOfMemoryError:
            raise
        except (ValueError, IndexError, TypeError, RuntimeError) as error:
            given = [f"{name} {each.dtype} {each.shape}" for name, each in self.tensors.items()]
            raise ConfigError(
                f"model: {self.file}: layer {self.layer}: {error} ({', '.join(given)})"
            ) from error


def whole_numbers(
    codes: Tensor,
    bits: int,
    scales: Tensor,
    zeros: Tensor | None,
    dtype: torch.dtype,
    *,
    group: int,
    group_of: Tensor | None = None,
) -> Weight:
    """(codes − zeros) · scales, for codes [outputs, inputs] from −2^(bits−1) on, scales and zeros
    [outputs, groups]. ``group_of`` [inputs] is the group of each input: by default ``group``
    adjacent inputs are one. If a group has fewer inputs, the weight is dense."""
    inputs = codes.shape[1]
    if zeros is not None and not zeros.any():
        zeros = None
    order = None
    if group_of is not None and not torch.equal(group_of, torch.arange(inputs) // group):
        order = torch.argsort(group_of, stable=True)
        if not torch.equal(group_of[order], torch.arange(inputs) // group):
            values = codes.float() - (0 if zeros is None else zeros.float()[:, group_of])
            return dense(values * scales.float()[:, group_of], dtype)
        codes = codes[:, order]
    is_short = bits <= 4
    return Quantized(
        pack_pairs((codes + 8).to(torch.uint8)) if is_short else codes.to(torch.int8),
        scales,
        dtype=dtype,
        inputs=inputs,
        group=group,
        table=INT4.clone() if is_short else None,
        zeros=zeros,
        order=order,
    )


def dense(values: Tensor, dtype: torch.dtype) -> Dense:
    outputs, inputs = values.shape
    weight = Dense(outputs, inputs, dtype)
    weight.values.copy_(values)
    return weight

"""The ranks that compute a model together, and the shards of its weights on each rank.

Attention is split by heads and the feed-forward network by its inner size, so that a rank's GEMM
after each is a part of a sum over ranks. Experts are split like the feed-forward network, or each
is whole on one rank. Embeddings and the output head are split by vocabulary. A norm over all heads
has the weights of a rank's heads, and its squares are summed over ranks. All other modules, such as
other norms and routers, are whole on each rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from services.worker.layers.stage import WHOLE, Stage
from shared.errors import ConfigError

MAX_SIZE = 64  # the largest that an error suggests


class Shard(NamedTuple):
    """A rank's part of ``total`` rows or columns: ``num`` of them, from ``start`` on."""

    start: int
    num: int
    total: int

    def times(self, factor: int) -> "Shard":
        return Shard(self.start * factor, self.num * factor, self.total * factor)


class Rows(NamedTuple):
    """The rows ``ids`` [num] int64 of ``total`` ones, in this order."""

    ids: np.ndarray
    total: int

    @property
    def num(self) -> int:
        return len(self.ids)


def as_shard(size: int | Shard) -> Shard:
    """A plain size is all there is."""
    return size if isinstance(size, Shard) else Shard(0, size, size)


class Group(Protocol):
    """The collective operations of ranks. All ranks make the same calls in the same order, with
    tensors of one shape, and get the same bits."""

    def sum(self, part: Tensor) -> Tensor:
        """Adds up the parts of all ranks, in a tensor of their type."""

    def gather(self, part: Tensor) -> Tensor:
        """[…] of each → [size, …]"""

    def first(self, own: Tensor) -> Tensor:
        """Returns the tensor of rank 0."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """One of ``size`` ranks, which meet in a ``group``. Without one a model is only laid out.
    ``has_whole_experts``: each expert is one rank's. Of a model's layers ``stage`` says which are
    here."""

    rank: int
    size: int
    group: Group | None = None
    has_whole_experts: bool = False
    stage: Stage = WHOLE

    def sum(self, part: Tensor) -> Tensor:
        return part if self.size == 1 else self._ranks.sum(part)

    def join(self, part: Tensor, total: int) -> Tensor:
        """[T, this rank's share of ``total``], as ``vocabulary`` cuts it → [T, total]"""
        if self.size == 1:
            return part
        width = -(-total // self.size)
        parts = self._ranks.gather(functional.pad(part, (0, width - part.shape[1])))
        return parts.transpose(0, 1).flatten(1)[:, :total].contiguous()

    def first(self, own: Tensor) -> Tensor:
        """Returns the tensor of rank 0."""
        return own if self.size == 1 else self._ranks.first(own)

    def gather(self, own: Tensor) -> Tensor:
        """[…] of each → [size, …]"""
        return own[None] if self.size == 1 else self._ranks.gather(own)

    def least(self, number: int) -> int:
        """Returns the smallest that a rank has."""
        if self.size == 1:
            return number
        return int(self._ranks.gather(torch.tensor([number])).min())

    def num_alike(self, number: int) -> int:
        """Returns the number of ranks with the same ``number``, this one included."""
        if self.size == 1:
            return 1
        return int((self._ranks.gather(torch.tensor([number])) == number).sum())

    @property
    def _ranks(self) -> Group:
        if self.group is None:
            raise RuntimeError(f"rank {self.rank} of {self.size} has no group")
        return self.group

    def heads(
        self,
        num_heads: int,
        num_kv_heads: int,
        names: tuple[str, str] = ("num_attention_heads", "num_key_value_heads"),
    ) -> tuple[Shard, Shard]:
        """This rank's query heads and the KV heads that they share. Where ranks outnumber KV heads,
        several hold the same. Raises ConfigError with the config's ``names``."""
        self._check(
            f"{names[0]} {num_heads} with {names[1]} {num_kv_heads}",
            lambda n: num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0),
        )
        num = max(1, num_kv_heads // self.size)
        first = self.rank * num_kv_heads // self.size
        return self._share(num_heads), Shard(first, num, num_kv_heads)

    def inner(self, size: int) -> Shard:
        """This rank's part of a feed-forward network's inner ``size``. Raises ConfigError."""
        self._check(f"intermediate_size {size}", lambda n: size % n == 0)
        return self._share(size)

    def experts(self, num: int, size: int) -> list[Shard]:
        """This rank's part of the inner ``size`` of each of ``num`` experts: with whole experts,
        all of some adjacent experts and nothing of others; ranks' numbers of experts differ by one
        at most. Raises ConfigError."""
        if not self.has_whole_experts:
            return [self.inner(size)] * num
        self._check(f"{num} whole experts", lambda n: n <= num)
        first, end = (num * rank // self.size for rank in (self.rank, self.rank + 1))
        return [Shard(0, size if first <= expert < end else 0, size) for expert in range(num)]

    def vocabulary(self, size: int) -> Shard:
        """This rank's part of ``size`` tokens; the last rank's may be smaller. Raises
        ConfigError."""
        width = -(-size // self.size)
        self._check(f"vocab_size {size}", lambda n: -(-size // n) * (n - 1) < size)
        start = self.rank * width
        return Shard(start, min(width, size - start), size)

    def _share(self, total: int) -> Shard:
        num = total // self.size
        return Shard(self.rank * num, num, total)

    def _check(self, what: str, divides: Callable[[int], bool]) -> None:
        if not divides(self.size):
            raise cannot_split(what, self.size, divides)


def cannot_split(what: str, num_ranks: int, divides: Callable[[int], bool]) -> ConfigError:
    """An error that names the sizes that would work."""
    sizes = ", ".join(str(size) for size in range(1, MAX_SIZE + 1) if divides(size))
    return ConfigError(f"model: {what} cannot be split over {num_ranks} ranks; {sizes} would work")


ALONE = Parallel(0, 1)

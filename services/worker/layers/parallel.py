"""The ranks that compute a model together, and the shards that each holds of its weights.

Attention is split by heads and the feed-forward network by its inner size, so that a rank's product
behind either is a part of a sum over ranks. All else, vocabulary and norms too, is whole on each.
No backend adds up over ranks yet: each refuses a model that is shared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from shared.errors import ConfigError

MAX_SIZE = 64  # the largest that an error suggests


class Shard(NamedTuple):
    """What a rank holds of ``total`` rows or columns: ``num`` of them, from ``start`` on."""

    start: int
    num: int
    total: int

    def times(self, factor: int) -> "Shard":
        return Shard(self.start * factor, self.num * factor, self.total * factor)


def as_shard(size: int | Shard) -> Shard:
    """A plain size is all there is."""
    return size if isinstance(size, Shard) else Shard(0, size, size)


@dataclass(frozen=True, slots=True)
class Parallel:
    """One of ``size`` ranks."""

    rank: int
    size: int

    def heads(self, num_heads: int, num_kv_heads: int) -> tuple[Shard, Shard]:
        """This rank's query heads and the KV heads that they share. Where ranks outnumber KV heads,
        several hold the same. Raises ConfigError."""
        self._check(
            f"num_attention_heads {num_heads} with num_key_value_heads {num_kv_heads}",
            lambda n: num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0),
        )
        num = max(1, num_kv_heads // self.size)
        first = self.rank * num_kv_heads // self.size
        return self._share(num_heads), Shard(first, num, num_kv_heads)

    def inner(self, size: int) -> Shard:
        """This rank's part of a feed-forward network's inner ``size``. Raises ConfigError."""
        self._check(f"intermediate_size {size}", lambda n: size % n == 0)
        return self._share(size)

    def _share(self, total: int) -> Shard:
        num = total // self.size
        return Shard(self.rank * num, num, total)

    def _check(self, what: str, divides: Callable[[int], bool]) -> None:
        if not divides(self.size):
            sizes = ", ".join(str(size) for size in range(1, MAX_SIZE + 1) if divides(size))
            raise ConfigError(
                f"model: {what} cannot be split over {self.size} ranks; {sizes} would work"
            )


ALONE = Parallel(0, 1)

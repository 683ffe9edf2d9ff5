"""The processes that have a model's layers one after the other (pipeline parallel), and the layers
of each."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from shared.errors import ConfigError


class Sent(Protocol):
    """A tensor on its way, which must stay as it is until ``wait`` returns."""

    def wait(self) -> object:
        """Until the other side has it."""


class StageConnection(Protocol):
    """The connection between stages. Messages from one stage to another arrive in the order of
    sending, separately for each ``kind``."""

    def send(self, tensor: Tensor, stage: int, kind: int) -> Sent:
        """Does not wait for the other side."""

    def receive(self, into: Tensor, stage: int, kind: int) -> None:
        """Waits until ``into``, with the shape and dtype of the sent tensor, is filled."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage ``number`` of ``num``, which send to each other by a ``line``. The first one has the
    embedding, the last one the output head and the MTP head. Without a line a model is only laid
    out."""

    number: int = 0
    num: int = 1
    line: StageConnection | None = None

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.num - 1

    @property
    def others(self) -> Iterator[int]:
        return (number for number in range(self.num) if number != self.number)

    def layers(self, num_layers: int) -> range:
        """Its layers, adjacent ones. If their number does not divide, the first stages have one
        more, because the last one has the heads. Raises ConfigError if a stage would have none."""
        if self.num > num_layers:
            raise ConfigError(
                f"pipeline-parallel-size: {self.num} stages, and the model has {num_layers} layers:"
                f" each needs one; 1 to {num_layers} would work"
            )
        start, end = (-(-num_layers * each // self.num) for each in (self.number, self.number + 1))
        return range(start, end)


WHOLE = Stage()

"""The prefix of a waiting sequence on its way from another worker's cache. Pure."""

from dataclasses import dataclass, field

from services.scheduler.moves.delivery import Delivery
from services.scheduler.moves.transfers import Transfers
from services.scheduler.sequence import Sequence

MIN_LOOKS, MAX_LOOKS = 2, 5  # without a unit, until a fetch is given up. Chosen


@dataclass(slots=True, eq=False)
class Fetch(Delivery):
    """The target has the ``first`` blocks of the sequence; computing the others would take
    ``computing_s``, or an unknown time: 0."""

    source: Transfers
    target: Transfers
    first: int
    began_s: float
    computing_s: float
    num_units: int = field(init=False)
    num_looks_in_all: int = field(default=0, init=False)
    _end: int = field(init=False)
    blocks: list[int] = field(init=False)

    def __post_init__(self) -> None:
        hit = self.source.worker.blocks.find_hit(self.sequence)
        self._end = hit.num_blocks
        self.blocks = [block for table in hit.tables for block in table]
        if hit.point is not None:
            self._use(hit.point)
        self.count()
        self.num_units = self.num_wanted - self.num_there

    @property
    def num_whole(self) -> int:
        return self._end if self.source.shape.has_whole else 0

    @property
    def num_wanted(self) -> int:
        return self.num_whole + len(self._parts)

    @property
    def end(self) -> int:
        return self._end

    @property
    def num_bytes(self) -> int:
        return self.num_units * self.target.message.block_bytes

    @property
    def num_usable(self) -> int:
        """Counts the blocks after which the target can begin now."""
        if self.num_there >= self.num_wanted:
            return self._end
        return self.first if self.source.shape.has_points else max(self.first, self.num_there)

    @property
    def is_over(self) -> bool:
        """True if a worker has admitted the sequence."""
        return self.sequence.allocation is not None

    @property
    def is_late(self) -> bool:
        """True if no unit on its way has come for long, or computing would have been quicker."""
        most = min(max(MIN_LOOKS, int(self.computing_s)), MAX_LOOKS)
        in_all = most + (self.computing_s or MAX_LOOKS)
        return self.num_looks >= most or self.num_looks_in_all >= in_all

    def look(self) -> None:
        """Counts the looks: all of them, and those since a unit has come while others were sent."""
        self.num_looks_in_all += 1
        self.num_looks += self.num_pushed > self.num_there

    def brings(self, sequence: Sequence, num: int) -> bool:
        """True if at least ``num`` blocks that are still to come are of ``sequence`` too: if one
        is, then all blocks before it are."""
        size, number = self.source.shape.block_size, self.num_usable + num - 1
        if number >= min(self._end, sequence.max_cached // size):
            return False
        return self.sequence.block_hash(number, size) == sequence.block_hash(number, size)

    def follow(self) -> None:
        num_before = self.num_there
        self.count()
        self.is_stuck |= self.point is not None and not self._is_kept(self.point)
        if self.num_there > num_before:
            self.num_looks = 0

"""Runs in which workers fetch prefixes from each other: few prompts, and workers with few slots."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

from msgspec.structs import replace

from services.scheduler.copy_times.times import CopyOrCompute
from services.scheduler.moves.fetches import HITS
from tests.sim.clients import job_of
from tests.sim.mesh import Shape
from tests.sim.moves import MoveShape
from tests.sim.run import PLAIN, Run
from tests.sim.virtual_loop import THREAD_S

INIT, JOB_NUMBER = Shape.__init__, Run._job_number
LONGEST = sorted(PLAIN, key=lambda number: -sum(len(each.data) for each in job_of(number).prompts))
NUM_PROMPTS = 4


@contextmanager
def few_prompts() -> Iterator[None]:
    """At any speed."""
    with (
        patch.object(Shape, "__init__", _init),
        patch.object(Run, "_job_number", _job_number),
        patch.object(CopyOrCompute, "takes_all", lambda *_: True),
    ):
        yield


def _init(self: Shape, random: Random | None) -> None:
    INIT(self, random)
    if random is None:
        return
    apart = Random(f"peers {random.getstate()}")
    self.num |= {"scheduler": 1, "worker": apart.choice([2, 3])}
    self.step_s = 10 * THREAD_S
    self.capacity = replace(self.capacity, max_num_seqs=apart.choice([1, 2, 4]))
    self.settings["scheduler"]["enable_prefix_caching"] = True
    self.moves = MoveShape(num_blocks=apart.choice([2, 100]), num_pieces=self.moves.num_pieces)


def _job_number(self: Run, served: set[str]) -> int:
    return self.random.choice(LONGEST[:NUM_PROMPTS])


def num_hits(outcome: str = "done") -> float:
    return HITS.labels(outcome)._value.get()

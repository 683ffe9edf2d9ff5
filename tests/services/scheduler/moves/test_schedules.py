"""Random schedules with moves: every block that is taken is the one that was pushed, every lost one
is computed again, and every sequence ends with its own tokens."""

from collections import Counter
from collections.abc import Iterable

import pytest

from services.scheduler.moves.fetches import HITS
from services.scheduler.moves.moves import MOVES
from tests.services.scheduler.moves.schedules import run_moving

NUM_SCHEDULES = 60
RARE = (120, 174, 187, 215, 539, 734)  # losses, moves that are given up, and states
KINDS = ("done", "ended", "given_up", "lost")
OUTCOMES = [(why, what) for why in ("leaving", "role") for what in KINDS]


def meet(numbers: Iterable[int]) -> Counter[str]:
    met: Counter[str] = Counter()
    before = {each: MOVES.labels(*each)._value.get() for each in OUTCOMES}
    hits = {each: HITS.labels(each)._value.get() for each in KINDS}
    for number in numbers:
        mesh = run_moving(number)
        met[f"depth {mesh.depth}"] += 1
        met["lost"] += mesh.num_lost
        for each in mesh.all_workers:
            met["pushed"] += each.num_pushed
            met["taken"] += each.num_taken
            met["discarded"] += each.num_discarded
            kind = "states" if each.num_pieces else "windows"
            met[f"parts of {kind}"] += each.num_parts_taken
    for outcome in OUTCOMES:
        met[" ".join(outcome)] = int(MOVES.labels(*outcome)._value.get() - before[outcome])
    for kind in KINDS:
        met[f"fetches {kind}"] = int(HITS.labels(kind)._value.get() - hits[kind])
    return met


@pytest.mark.seconds
def test_random_schedules_with_moves_keep_the_contract() -> None:
    met = meet([*range(NUM_SCHEDULES), *RARE])
    assert all(met.values()), met


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_schedules_with_moves_keep_the_contract() -> None:
    meet(range(NUM_SCHEDULES, 20_000))

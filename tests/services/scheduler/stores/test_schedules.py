"""Random schedules with stores: every block that is loaded is the one that was saved, every lost
one is computed again, and every sequence ends."""

from collections import Counter
from collections.abc import Iterable

import pytest

from tests.services.scheduler.schedules import run_schedule
from tests.services.scheduler.stores.schedules import StoreMesh

NUM_SCHEDULES = 60
RARE = (74, 141)  # windows and states that are loaded


def meet(numbers: Iterable[int]) -> Counter[str]:
    met: Counter[str] = Counter()
    for number in numbers:
        mesh = run_schedule(number, StoreMesh)
        assert isinstance(mesh, StoreMesh)
        met[f"depth {mesh.depth}"] += 1
        for each in mesh.all_workers:
            met.update(saved=each.num_saved, loaded=each.num_loaded, lost=each.num_lost)
            met.update(states=each.num_states_loaded, windows=each.num_windows_loaded)
    return met


@pytest.mark.seconds
def test_random_schedules_with_stores_keep_the_contract() -> None:
    met = meet([*range(NUM_SCHEDULES), *RARE])
    assert len(met) == 7
    assert all(met.values()), met


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_schedules_with_stores_keep_the_contract() -> None:
    meet(range(NUM_SCHEDULES, 20_000))

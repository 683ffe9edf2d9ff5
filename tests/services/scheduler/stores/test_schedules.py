"""Random schedules with stores: every block that is loaded is the one that was saved, every lost
one is computed again, and every sequence ends."""

from collections import Counter
from collections.abc import Iterable

import pytest

from services.scheduler.stores.choice import DECLINED_TOKENS
from tests.services.scheduler.schedules import run_schedule
from tests.services.scheduler.stores.schedules import ChatMesh, StoreMesh

NUM_SCHEDULES = 60
RARE = (74, 141)  # windows and states that are loaded


def meet(numbers: Iterable[int], kind: type[StoreMesh] = StoreMesh) -> Counter[str]:
    met: Counter[str] = Counter()
    declined = DECLINED_TOKENS._value.get()
    for number in numbers:
        mesh = run_schedule(number, kind)
        assert isinstance(mesh, StoreMesh)
        met[f"depth {mesh.depth}"] += 1
        for each in mesh.all_workers:
            met.update(saved=each.num_saved, loaded=each.num_loaded, lost=each.num_lost)
            met.update(states=each.num_states_loaded, windows=each.num_windows_loaded)
            met.update(fetched=each.num_fetched, spilled=each.num_spilled)
    met.update(declined=int(DECLINED_TOKENS._value.get() - declined))
    return met


@pytest.mark.seconds
def test_random_schedules_with_stores_keep_the_contract() -> None:
    met = meet([*range(NUM_SCHEDULES), *RARE]) + meet(range(NUM_SCHEDULES), ChatMesh)
    assert len(met) == 10
    assert all(met.values()), met


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_random_schedules_with_stores_keep_the_contract() -> None:
    meet(range(NUM_SCHEDULES, 20_000))
    meet(range(NUM_SCHEDULES, 20_000), ChatMesh)

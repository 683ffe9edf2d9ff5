"""The order in which batches start."""

from services.gateway.apis.batches.folder import BatchKey
from services.gateway.apis.batches.runner import start


def started(waiting: dict[str, int], running: str = "", locked: tuple[str, ...] = ()) -> list[str]:
    """Names are an owner and an id; ``locked`` batches cannot start."""
    found: list[str] = []

    def try_start(key: BatchKey) -> bool:
        name = "".join(key)
        if name not in locked:
            found.append(name)
        return name not in locked

    keys = {BatchKey(name[0], name[1:]): created_at for name, created_at in waiting.items()}
    start(keys, [BatchKey(owner, "running") for owner in running], try_start)
    return found


def test_the_oldest_batches_of_a_key_start_first():
    waiting = {f"a{number}": 100 - number for number in range(6)}
    assert started(waiting) == ["a5", "a4", "a3", "a2"]


def test_keys_take_turns():
    waiting = {"a1": 1, "a2": 2, "a3": 3, "b1": 4, "b2": 5, "c1": 6}
    assert started(waiting) == ["a1", "b1", "c1", "a2"]
    assert started(waiting, running="ab") == ["c1", "a1"]


def test_a_key_always_has_one_batch_that_runs():
    assert started({"a1": 1, "b1": 2, "c1": 3}, running="aaaa") == ["b1", "c1"]
    assert started({"a1": 1, "b1": 2}, running="aaaab") == []


def test_batches_of_other_gateways_take_no_place():
    waiting = {"a1": 1, "a2": 2, "b1": 3}
    assert started(waiting, running="ccc", locked=("a1",)) == ["a2", "b1"]

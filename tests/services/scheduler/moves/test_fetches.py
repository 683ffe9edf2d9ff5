"""Waiting sequences fetch prefixes that other workers have."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from services.scheduler.copy_times.times import MIN_TIMES, TRY_EVERY
from services.scheduler.moves import fetches
from services.scheduler.moves.fetch import MAX_LOOKS, MIN_LOOKS
from services.scheduler.moves.fetches import DECLINED_TOKENS, HIT_TOKENS, HITS, MAX_FETCHES
from services.scheduler.moves.inbox import FORGET_S
from services.scheduler.worker_state import LOOK_S
from shared.wire.envelope import RequestOptions
from shared.wire.messages import Cancel, Inbox, RequestKey, State
from tests.services.scheduler.moves.cell_of_workers import INBOX, PROMPT, CellOfWorkers, Worker

FORGET_LOOKS = int(FORGET_S / LOOK_S)
NUM_CACHED = 36  # of the prompt, in full blocks before its last token
DONE, ENDED, GIVEN_UP, LOST = "done", "ended", "given_up", "lost"


@pytest.fixture(autouse=True)
def short_prefixes() -> Iterator[None]:
    with patch.object(fetches, "MIN_TOKENS", 8):
        yield


class Counts:
    """The changes of the metrics since its beginning."""

    def __init__(self) -> None:
        self._before = self._now()

    def _now(self) -> dict[str, float]:
        found = {each: HITS.labels(each)._value.get() for each in (DONE, ENDED, GIVEN_UP, LOST)}
        return found | {
            "tokens": HIT_TOKENS._value.get(),
            "declined": DECLINED_TOKENS._value.get(),
        }

    def __call__(self) -> dict[str, float]:
        now = self._now()
        return {key: now[key] - before for key, before in self._before.items() if now[key] > before}


def with_holder(
    tmp_path: Path, inbox: Inbox = INBOX, num_steps: int = 6, options: RequestOptions | None = None
) -> tuple[CellOfWorkers, Worker, Worker]:
    """The worker ``one`` has the prompt, and no slot for others."""
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", max_num_seqs=1)
    cell.ask("holds", max_tokens=150, options=options)
    cell.run(num_steps)
    assert len(one.running) == 1
    return cell, one, Worker(cell, "two", inbox=inbox)


def pinned(worker: Worker) -> int:
    return sum(map(len, worker.transfers.pins._blocks.values()))


def fetching(cell: CellOfWorkers) -> int:
    return len(cell.moves._fetches._fetches)


def at_rest(cell: CellOfWorkers) -> None:
    assert not fetching(cell)
    for each in cell.workers.values():
        assert not pinned(each)
        assert not each.transfers.fetches
        assert not each.transfers.served
        assert each.transfers.worker.pool.num_owned == sum(
            len(sequence.allocated.blocks) for sequence in each.running
        )


async def test_a_prefix_of_a_full_worker_is_fetched_instead_of_computed(tmp_path: Path) -> None:
    cell, one, two = with_holder(tmp_path)
    counts = Counts()
    cell.ask("new")
    cell.run(8)
    assert two.admitted == [("new", NUM_CACHED)]
    assert cell.sequences["new"][0].num_cached == NUM_CACHED
    assert len(one.pushes) == len(two.takes) == NUM_CACHED // 4
    assert counts() == {DONE: 1, "tokens": NUM_CACHED}
    at_rest(cell)
    cell.finish()


async def test_a_worker_with_the_prefix_and_room_admits_the_sequence_itself(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    cell.ask("holds")
    cell.run()
    two = Worker(cell, "two")
    cell.ask("new")
    cell.run(1)
    assert one.admitted[-1] == ("new", NUM_CACHED)
    assert not two.admitted
    assert not one.pushes
    cell.finish()


async def test_sequences_with_other_salts_or_owners_fetch_nothing(tmp_path: Path) -> None:
    cell, one, two = with_holder(tmp_path, options=RequestOptions(salt="a"))
    counts = Counts()
    cell.ask("other", options=RequestOptions(salt="b"))
    cell.run(8)
    assert two.admitted == [("other", 0)]
    assert not one.pushes
    cell.run(16)
    cell.ask("same", options=RequestOptions(salt="a"))
    cell.run(8)
    assert two.admitted[1:] == [("same", NUM_CACHED)]
    assert counts() == {DONE: 1, "tokens": NUM_CACHED}
    cell.finish()


async def test_others_are_admitted_before_a_sequence_that_waits_for_a_fetch(tmp_path: Path) -> None:
    cell, _, two = with_holder(tmp_path)
    cell.ask("waits")
    cell.run(2, delivers=False)
    cell.ask("other", PROMPT + 500)
    cell.run(6, delivers=False)
    assert [name for name, _ in two.admitted] == ["other"]
    cell.deliver()
    cell.run(6)
    assert two.admitted[1:] == [("waits", NUM_CACHED)]
    cell.finish()


async def test_a_sequence_that_waits_for_a_fetch_preempts_nobody(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    Worker(cell, "one", max_num_seqs=1)
    cell.ask("holds", max_tokens=150, options=RequestOptions(priority=-1))
    cell.run(6)
    two = Worker(cell, "two", max_num_seqs=1)
    cell.ask("waits")
    cell.run(2, delivers=False)
    cell.ask("later", PROMPT + 500, options=RequestOptions(priority=1))
    cell.run(6, delivers=False)
    assert two.admitted == [("later", 0)]
    later = cell.sequences["later"][0]
    assert not later.num_preemptions
    cell.deliver()
    cell.run(20)
    assert two.admitted[1:] == [("waits", NUM_CACHED)]
    assert later.num_preemptions > 0
    cell.finish()


async def test_sequences_with_one_prefix_wait_for_one_fetch(tmp_path: Path) -> None:
    cell, one, two = with_holder(tmp_path)
    counts = Counts()
    for number in range(3):
        cell.ask(f"r{number}", np.append(PROMPT, number).astype(np.int32))
    cell.run(8)
    assert sorted(two.admitted) == [(f"r{number}", 40) for number in range(3)]
    assert len(one.pushes) == 10
    assert counts() == {DONE: 1, "tokens": 40}
    cell.finish()


async def test_the_number_of_fetches_at_a_time_is_limited(tmp_path: Path) -> None:
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", max_num_seqs=MAX_FETCHES + 1, num_blocks=400)
    prompts = [PROMPT + 50 * number for number in range(MAX_FETCHES + 1)]
    for number, prompt in enumerate(prompts):
        cell.ask(f"holds{number}", prompt, max_tokens=150)
    cell.run(20)
    assert len(one.running) == MAX_FETCHES + 1
    two = Worker(cell, "two", max_num_seqs=8, num_blocks=400)
    for number, prompt in enumerate(prompts):
        cell.ask(f"r{number}", prompt)
    cell.run(4, delivers=False)
    assert len(two.transfers.fetches) == MAX_FETCHES
    assert two.admitted == [(f"r{MAX_FETCHES}", 0)]
    cell.finish()


@pytest.mark.parametrize(("byte_s", "is_fetched"), [(1e-9, True), (1.0, False), (0.0, True)])
async def test_a_prefix_is_fetched_if_that_is_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, byte_s: float, is_fetched: bool
) -> None:
    """A time that is not known declines none."""
    cell, one, two = with_holder(tmp_path)
    measure(monkeypatch, one, two, byte_s)
    counts = Counts()
    cell.ask("new")
    cell.run(8)
    assert two.admitted == [("new", NUM_CACHED if is_fetched else 0)]
    assert counts().get("declined", 0) == (0 if is_fetched else NUM_CACHED)
    cell.finish()


async def test_a_prefix_is_fetched_after_many_were_declined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, one, two = with_holder(tmp_path)
    measure(monkeypatch, one, two, 1.0)
    two.transfers.choice._num_declined = TRY_EVERY
    cell.ask("new")
    cell.run(8)
    assert two.admitted == [("new", NUM_CACHED)]
    assert not two.transfers.choice._num_declined
    cell.finish()


def measure(monkeypatch: pytest.MonkeyPatch, one: Worker, two: Worker, byte_s: float) -> None:
    for _ in range(MIN_TIMES):
        two.transfers.times_from(one.transfers).note(1, byte_s)
    share = two.transfers.worker.stream_share
    monkeypatch.setattr(share, "alone_s", lambda num, num_keys: float(num))


async def test_fetches_are_measured(tmp_path: Path) -> None:
    cell, one, two = with_holder(tmp_path)
    cell.ask("new")
    cell.run(8)
    (time_s,) = two.transfers.times_from(one.transfers)._times
    assert time_s > 0
    cell.finish()


async def test_the_source_keeps_the_blocks_until_they_are_there(tmp_path: Path) -> None:
    """All others that are cached there are evicted meanwhile."""
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", max_num_seqs=1, num_blocks=40)
    cell.ask("before", max_tokens=1)
    cell.run()
    cell.ask("holds", PROMPT + 100, max_tokens=60)
    cell.run(2)
    two = Worker(cell, "two", inbox=Inbox("layout", "here", 2, 1 << 10))
    cell.ask("new", max_tokens=2)
    one_pool = one.transfers.worker.pool
    cell.run(2)
    assert pinned(one) == 9
    one_pool.free(one_pool.try_allocate(one_pool.num_free) or [])  # evicts all others
    cell.run(30)
    assert two.admitted == [("new", NUM_CACHED)]
    at_rest(cell)
    cell.finish()


@pytest.mark.parametrize(("prompt_len", "reply_len"), [(70, 20), (40, 50)])
async def test_blocks_on_their_way_yield_to_sequences_of_the_source(
    tmp_path: Path, prompt_len: int, reply_len: int
) -> None:
    """To a prompt, or to output."""
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", max_num_seqs=1, num_blocks=24)
    cell.ask("before", max_tokens=1)
    cell.run()
    one.set_state(State.NOT_READY)
    two = Worker(cell, "two")
    cell.ask("new", max_tokens=2, options=RequestOptions(priority=3))
    cell.run(1, delivers=False)
    assert pinned(one) == 9
    two.set_state(State.NOT_READY)
    one.set_state(State.READY)
    cell.ask("large", np.arange(prompt_len, dtype=np.int32) + 100, max_tokens=reply_len)
    cell.run(4, delivers=False)
    assert [name for name, _ in one.admitted] == ["before", "large"]
    assert fetching(cell)
    cell.run(reply_len, delivers=False)
    assert not pinned(one)
    assert not cell.sequences["large"][0].num_preemptions
    two.set_state(State.READY)
    cell.look(FORGET_LOOKS)
    cell.finish()
    at_rest(cell)


@pytest.mark.parametrize("num_delivered", [0, 4])
@pytest.mark.parametrize("num_rounds", [1, 2, 3])
@pytest.mark.parametrize("what", ["source", "target", "link", "abort", "reset"])
async def test_a_fetch_that_fails_in_any_phase_leaves_nothing(
    tmp_path: Path, what: str, num_rounds: int, num_delivered: int
) -> None:
    cell, one, two = with_holder(tmp_path)
    counts = Counts()
    cell.ask("new", max_tokens=20)
    cell.run(num_rounds, delivers=False)
    cell.deliver(num_delivered)
    cell.run(1, delivers=False)
    assert fetching(cell)
    match what:
        case "source":
            one.die()
        case "target":
            two.die()
            Worker(cell, "three")
        case "link":
            cell.on_the_way.clear()
            cell.look(MAX_LOOKS)
            assert cell.moves._fetches._avoided or num_rounds == 1
            assert not one.transfers.avoided  # moves may still go there
        case "abort":
            key = RequestKey("new~1/0/0", 1)
            cell.service.on_message(cell.tokenizer, Cancel([key]), [])
            del cell.asked["new"], cell.sequences["new"]
            cell.look()
        case "reset":
            cell.service._reset_prefix_cache()
            cell.run(1)
            assert ("new", 0) in two.admitted
    if what != "link":
        at_rest(cell)
    cell.run(8)
    cell.look(FORGET_LOOKS)  # the places of blocks that are lost
    cell.finish()
    at_rest(cell)
    outcome = {"source": LOST, "target": LOST, "abort": ENDED}.get(what, GIVEN_UP)
    assert counts()[outcome] == 1


async def test_a_fetch_from_a_worker_that_hangs_is_given_up(tmp_path: Path) -> None:
    cell, _, two = with_holder(tmp_path)
    hanging = cell.workers.pop("one")
    cell.service._plan()
    cell.ask("new")
    cell.run(2)
    assert fetching(cell)
    cell.look(MIN_LOOKS + MAX_LOOKS)
    assert not fetching(cell)
    cell.run(2)
    assert two.admitted == [("new", 0)]
    cell.workers["one"] = hanging
    cell.finish()


async def test_workers_of_another_layout_fetch_nothing(tmp_path: Path) -> None:
    cell, one, two = with_holder(tmp_path, inbox=Inbox("other", "here", 100, 1 << 10))
    cell.ask("new")
    cell.run(8)
    assert two.admitted == [("new", 0)]
    assert not one.pushes
    cell.finish()

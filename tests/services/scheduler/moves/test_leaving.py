"""Sequences of a leaving worker go on elsewhere, with their blocks."""

from pathlib import Path

import numpy as np
import pytest

from services.scheduler.moves.cell import RECOMPUTED
from services.scheduler.moves.moves import AVOID_LOOKS, MOVES, RETRY_LOOKS
from services.scheduler.sequence import Sequence, WaitReason
from shared.wire.messages import Detach, Inbox, Meet, Release, State
from tests.services.scheduler.moves.cell_of_workers import CellOfWorkers, Worker


def outcome(why: str, result: str) -> float:
    return MOVES.labels(why, result)._value.get()


def recomputed(why: str) -> float:
    return RECOMPUTED.labels(why)._value.get()


def with_running(tmp_path: Path, num: int = 1, num_steps: int = 6) -> tuple[CellOfWorkers, Worker]:
    """The worker ``one`` has computed the prompts of ``num`` requests."""
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    for number in range(num):
        cell.ask(f"r{number}", np.arange(40, dtype=np.int32) + 50 * number, max_tokens=80)
    cell.run(num_steps)
    assert len(one.running) == num
    return cell, one


async def test_a_running_sequence_moves_and_only_its_last_tokens_are_computed_again(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    done, again = outcome("leaving", "done"), recomputed("moved")
    why: list[WaitReason] = []
    before = cell.core.queues.on_return

    def on_return(sequence: Sequence, reason: WaitReason) -> None:
        before(sequence, reason)
        why.append(reason)

    cell.core.queues.on_return = on_return
    one.drain()
    cell.run(40)
    assert why == [WaitReason.MOVED]
    assert outcome("leaving", "done") == done + 1
    ((_, num_cached),) = two.admitted
    assert num_cached >= 40
    assert len(one.pushes) == len(two.takes) == num_cached // 4
    assert recomputed("moved") == again
    assert not one.running
    cell.finish()


async def test_a_push_names_a_worker_that_was_introduced_once(tmp_path: Path):
    cell, one = with_running(tmp_path, num=2)
    Worker(cell, "two")
    one.drain()
    cell.run(3)
    assert [each for each, _ in one.peer.take(Meet)] == [Meet("two", "")]
    assert {each.worker for each in one.pushes} == {"two"}


@pytest.mark.parametrize(
    ("address", "met"), [("tcp://there:1", [Meet("two", "tcp://there:1")]), ("", [])]
)
async def test_a_worker_elsewhere_needs_an_address(tmp_path: Path, address: str, met: list[Meet]):
    cell, one = with_running(tmp_path)
    Worker(cell, "two", Inbox("layout", "there", 100, 1 << 10, address))
    one.drain()
    cell.run(40)
    assert [each for each, _ in one.peer.take(Meet)] == met
    assert bool(one.pushes) == bool(met)
    cell.finish()


@pytest.mark.parametrize(
    "inbox", [None, Inbox("other", "here", 100, 1 << 10)], ids=["no inbox", "another layout"]
)
async def test_a_worker_without_such_blocks_is_no_target(tmp_path: Path, inbox: Inbox | None):
    cell, one = with_running(tmp_path)
    Worker(cell, "two", inbox)
    one.drain()
    cell.run(10)
    assert one.running
    assert not one.pushes


async def test_the_last_worker_keeps_its_sequences(tmp_path: Path):
    cell, one = with_running(tmp_path)
    one.drain()
    cell.look()
    resources = one.transfers.worker.resources
    assert one.transfers not in resources, "nothing is done for the only worker"
    cell.finish()


async def test_at_most_four_move_at_once_the_oldest_first(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one", max_num_seqs=8)
    for number in range(6):
        cell.ask(f"r{number}", np.arange(12, dtype=np.int32) + 50 * number, max_tokens=80)
    cell.run(14)
    Worker(cell, "two", max_num_seqs=8, num_blocks=200)
    one.drain()
    cell.look()
    moving = [each.request[:2] for each in one.transfers.moves]
    assert moving == ["r0", "r1", "r2", "r3"]
    cell.run(60)
    assert not one.running
    cell.finish()


async def test_blocks_follow_a_sequence_that_goes_on_meanwhile(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    for _ in range(12):
        cell.run(1, delivers=False)
    assert one.running, "no block has come"
    num_before = len(one.running[0].emitted)
    cell.run(30)
    ((_, num_cached),) = two.admitted
    assert num_cached >= 40 + num_before - 4
    cell.finish()


async def test_a_switching_sequence_waits_for_its_plans_in_flight(tmp_path: Path):
    cell, one = with_running(tmp_path)
    Worker(cell, "two")
    one.drain()
    (sequence,) = one.running
    while not sequence.allocated.is_held:
        cell.run(1)
    assert one.transfers.worker.in_flight
    assert not one.transfers.worker.runnable()
    num_emitted = len(sequence.emitted)
    one.step()
    assert len(sequence.emitted) == num_emitted + 1
    assert sequence in cell.core.queues.waiting
    cell.finish()


async def test_choices_of_a_prompt_share_their_blocks_on_the_way(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    cell.ask("r", max_tokens=60, num_choices=3)
    cell.run(8)
    two = Worker(cell, "two")
    one.drain()
    cell.run(40)
    assert not one.running
    keys = [each.key for each in one.pushes]
    assert len(keys) == len({*keys})
    assert len(two.admitted) == 3
    assert all(num >= 40 for _, num in two.admitted)
    cell.finish()


async def test_blocks_that_the_target_has_are_not_pushed(tmp_path: Path):
    cell, one = with_running(tmp_path)
    one.set_state(State.NOT_READY)
    two = Worker(cell, "two")
    cell.ask("same", np.arange(40, dtype=np.int32), max_tokens=4)
    cell.run(20)
    assert ("same", 0) in two.admitted
    one.drain()
    cell.run(40)
    assert len(one.pushes) < 10
    assert not one.running
    cell.finish()


async def test_a_block_computed_meanwhile_is_discarded(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    for _ in range(3):
        one.step()
    assert one.pushes
    cell.ask("same", np.arange(40, dtype=np.int32), max_tokens=4)
    for _ in range(12):
        two.step()
    cell.run(40)
    assert len(two.discards) >= 9
    cell.finish()


async def test_a_full_target_is_waited_for(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two", max_num_seqs=1)
    one.set_state(State.NOT_READY)
    cell.ask("long", np.arange(7, 30, dtype=np.int32), max_tokens=30)
    cell.run(4)
    assert two.running
    one.drain()
    cell.run(10)
    assert not one.pushes, "there is no slot"
    cell.run(60)
    assert [each for each, _ in two.admitted] == ["long", "r0"]
    cell.finish()


async def test_a_target_that_is_lost_leaves_the_sequence_where_it_is(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    lost = outcome("leaving", "lost")
    one.drain()
    cell.run(2, delivers=False)
    assert one.transfers.moves
    two.die()
    assert outcome("leaving", "lost") == lost + 1
    assert not one.transfers.moves
    assert len(one.running) == 1
    cell.finish()


async def test_a_source_that_is_lost_ends_its_moves_and_late_blocks_are_discarded(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    again = recomputed("worker_lost")
    one.drain()
    cell.run(3, delivers=False)
    assert cell.on_the_way
    one.die()
    cell.deliver()
    cell.run(20)
    assert two.discards
    assert recomputed("worker_lost") > again
    cell.finish()


async def test_blocks_that_do_not_come_in_time_end_the_move(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    given_up = outcome("leaving", "given_up")
    cell.run(3, delivers=False)
    cell.look(RETRY_LOOKS)
    assert outcome("leaving", "given_up") == given_up + 1
    assert not one.transfers.moves
    cell.run(3)
    assert {each.key for each in two.discards} == {each.key for each in one.pushes}
    num_pushed = len(one.pushes)
    cell.look(RETRY_LOOKS)
    cell.run(3)
    assert len(one.pushes) == num_pushed, "the target is avoided for a while"
    cell.look(AVOID_LOOKS)
    cell.run(10)
    assert len(one.pushes) > num_pushed
    cell.finish()


async def test_a_place_of_a_block_that_never_comes_is_free_after_a_while(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    cell.run(3, delivers=False)
    assert len(two.transfers.inbox)
    cell.on_the_way.clear()
    cell.look(40)
    assert not len(two.transfers.inbox)
    cell.finish()


async def test_an_inbox_is_never_overfull(tmp_path: Path):
    cell, one = with_running(tmp_path, num=3, num_steps=10)
    two = Worker(cell, "two", Inbox("layout", "here", 3, 1 << 10))
    one.drain()
    for _ in range(60):
        cell.run(1, delivers=False)
        cell.deliver(2)
        assert len(two.simulated.inbox) + len(cell.on_the_way) <= 3
    assert len(two.admitted) > 1
    assert len(one.pushes) > 20
    cell.finish()


async def test_a_plan_pushes_eight_mebibytes_at_most(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    large = Inbox("layout", "here", 100, 3 << 20)
    one = Worker(cell, "one", large)
    cell.ask("r", max_tokens=80)
    cell.run(6)
    two = Worker(cell, "two", large)
    one.drain()
    cell.run(40)
    assert max(len(each.rows) for each in one.plans) == 2
    assert max(len(each.rows) for each in two.plans) == 2
    assert not one.running
    cell.finish()


async def test_after_a_reset_no_block_from_before_is_found(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    cell.run(3, delivers=False)
    cell.deliver(4)
    two.step()
    assert len(two.takes) == 4
    cell.service.commands()["reset_prefix_cache"]()
    cell.run(3)
    assert len(two.takes) == 4
    assert two.discards
    assert not two.transfers.worker.index
    cell.ask("same", max_tokens=4)
    cell.run(20)
    assert two.admitted[0] == ("same", 0)
    cell.finish()


async def test_copies_of_a_broken_sequences_blocks_are_forgotten(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    cell.run(3, delivers=False)
    cell.deliver(4)
    two.step()
    (sequence,) = one.running
    assert two.transfers.worker.num_cached(sequence) == 16
    one.transfers.distrust(sequence)
    assert two.transfers.worker.num_cached(sequence) == 0
    cell.run(3)
    assert len(two.takes) == 4
    cell.finish()


async def test_a_sequence_that_ends_first_ends_its_move(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    cell.ask("r", max_tokens=14)
    cell.run(6)
    two = Worker(cell, "two")
    ended = outcome("leaving", "ended")
    one.drain()
    cell.run(30, delivers=False)
    assert outcome("leaving", "ended") == ended + 1
    cell.deliver()
    cell.run()
    assert two.discards
    assert not two.takes
    cell.finish()


async def test_a_cancelled_sequence_ends_its_move(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    cell.run(2, delivers=False)
    cell.core.cancel(("r0~1/0/0", 1))
    del cell.asked["r0"]
    cell.run()
    cell.look()
    cell.run()
    assert not two.admitted
    cell.finish()


async def test_the_old_hand_over_goes_on_beside_moves(tmp_path: Path):
    cell, one = with_running(tmp_path, num=4, num_steps=14)
    two = Worker(cell, "two", max_num_seqs=8)
    one.drain()
    cell.run(2, delivers=False)
    assert len(one.transfers.moves) == 4
    cell.service.on_message(one.peer, Release(), [])
    cell.service.on_message(one.peer, Release(), [])
    cell.run(60)
    assert not one.running
    assert len(two.admitted) == 4
    cell.finish()


async def test_a_worker_that_attaches_again_is_introduced_again(tmp_path: Path):
    cell, one = with_running(tmp_path)
    two = Worker(cell, "two")
    one.drain()
    cell.run(2, delivers=False)
    assert one.peer.take(Meet)
    cell.service.on_message(two.peer, Detach(), [])
    two.attach()
    cell.run(40)
    assert one.peer.take(Meet)
    assert not one.running
    cell.finish()


async def test_without_a_prefix_cache_nothing_moves(tmp_path: Path):
    cell = CellOfWorkers(tmp_path, enable_prefix_caching=False)
    one = Worker(cell, "one")
    cell.ask("r", max_tokens=20)
    cell.run(6)
    Worker(cell, "two")
    one.drain()
    cell.run(10)
    assert one.running
    cell.finish()


async def test_a_sequence_without_credit_stays(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    cell.ask("r", max_tokens=20)
    (sequence,) = cell.core.sequences.values()
    sequence.max_emitted = 6
    cell.run(12)
    Worker(cell, "two")
    one.drain()
    cell.look(3)
    cell.run(10)
    assert one.running
    assert not one.pushes
    cell.grant("r", 300)
    cell.run(20)
    assert not one.running
    cell.finish()


async def test_a_prompt_that_is_scored_moves_once_its_blocks_are_of_use(tmp_path: Path):
    cell = CellOfWorkers(tmp_path)
    one = Worker(cell, "one")
    cell.ask("r", max_tokens=60, prompt_logprobs=0)
    cell.run(2)
    (sequence,) = one.running
    assert sequence.max_cached < len(sequence.prompt)
    two = Worker(cell, "two")
    one.drain()
    cell.run(40)
    assert not one.running
    assert two.admitted[0][1] >= 40
    cell.finish()

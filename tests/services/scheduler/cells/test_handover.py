"""Sequences a scheduler hands over to other cells, and sequences it keeps."""

import numpy as np
import pytest

from services.scheduler.cells import handover
from services.scheduler.cells.handover import CellHandover
from services.scheduler.scheduler import Scheduler
from services.scheduler.sequence import Arrival
from services.scheduler.tokens_message import Forwarding
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import (
    CELLS_MINOR,
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Capacity,
    Generate,
    Heartbeat,
    Hello,
    Lost,
    NewSequence,
    Overview,
    RequestKey,
    SamplingParams,
    State,
)
from tests.mesh.arena_parts import NO_IDS, FakePeer

CAPACITY = Capacity(num_blocks=16, block_size=4, max_num_seqs=4, max_num_batched_tokens=64,
                    max_model_len=64)  # fmt: skip
OURS, OTHER = Overview("us", 1, 0, 0, 16, 16, 4), Overview("other", 1, 0, 0, 16, 16, 4)
EMPTY, LEAVING = (
    Overview("empty", 0, 0, 0, 0, 0, is_ready=False),
    Overview("leaves", 1, 0, 0, 0, 0, 4, True),
)


def tokenizer(*overviews: Overview, minor: int = PROTOCOL_MINOR) -> FakePeer:
    peer = FakePeer(Hello(PROTOCOL_MAJOR, minor, "tokenizer", "t"))
    first, *more = overviews
    peer.status = Heartbeat(State.READY, "", 0, 0, overview=first, more_overviews=more)
    return peer


class Cell:
    """A scheduler's core and its tokenizers, each with one prompt of two choices."""

    def __init__(self, *tokenizers: FakePeer) -> None:
        self.core = Scheduler(max_waiting=100, priority_step_s=10)
        self.core.add_worker("w", CAPACITY)
        self.tokenizers = tokenizers
        routes = {route: Forwarding(peer, 0.01) for route, peer in enumerate(tokenizers)}
        self.num_changes = 0
        self.others = CellHandover(self.core, routes, "us", self._note_change)
        for route in routes:
            self.add(f"r{route}", route)

    def _note_change(self) -> None:
        self.num_changes += 1

    def add(
        self, name: str, route: int, num_worker_deaths: int = 0, attempt: int = 1, now_s: float = 0
    ) -> None:
        sequences = [NewSequence(f"{name}/{choice}", choice) for choice in range(2)]
        params = SamplingParams(seed=0, max_tokens=5)
        options = write_options(RequestOptions(num_worker_deaths=num_worker_deaths))
        generate = Generate(name, attempt, params, sequences, options=options)
        self.core.add(Arrival(generate, np.arange(3, dtype=np.int32), NO_IDS, route, now_s))

    @property
    def lost(self) -> list[list[Lost]]:
        return [[message for message, _ in peer.take(Lost)] for peer in self.tokenizers]


def lost(name: str, num_worker_deaths: int = 0) -> Lost:
    return Lost([RequestKey(name, 1)], True, "us", num_worker_deaths)


async def test_prompts_go_whole_and_only_where_their_tokenizer_has_another_cell() -> None:
    cell = Cell(
        tokenizer(OURS, EMPTY, LEAVING, OTHER),
        tokenizer(OURS, EMPTY, LEAVING),
        tokenizer(OURS, OTHER, minor=CELLS_MINOR - 1),
    )
    cell.core.plan("w")
    cell.others.hand_over([cell.core.sequences["r0/1", 1]])
    cell.others.hand_over(list(cell.core.sequences.values()))
    assert cell.lost == [[lost("r0")], [], []]
    assert cell.num_changes == 1
    kept = {"r1/0", "r1/1", "r2/0", "r2/1"}
    assert {name for name, _ in cell.core.sequences} == kept
    assert {each.reason for each in cell.core.take_ended()} == {"handed_over"}


async def test_a_sequence_with_a_worker_to_wait_for_is_not_stranded() -> None:
    cell = Cell(tokenizer(OURS, OTHER))
    assert not cell.core.unrunnable
    cell.core.note_state("w", is_ready=False)
    assert {each.request for each in cell.core.unrunnable} == {"r0/0", "r0/1"}
    cell.core.add_worker("other", CAPACITY)
    assert not cell.core.unrunnable


async def test_the_next_cell_knows_of_the_workers_that_died_and_computes_the_prompt_alone() -> None:
    cell = Cell(tokenizer(OURS, OTHER))
    cell.core.plan("w")
    cell.add("waits", 0)
    cell.core.remove_worker("w", 0)
    cell.others.hand_over(cell.core.unrunnable)
    ((first, second),) = cell.lost
    assert sorted([first, second], key=lambda each: each.num_worker_deaths) == [
        lost("waits"),
        lost("r0", 1),
    ]
    following = Cell()
    following.add("r0", 0, num_worker_deaths=1)
    following.add("waits", 0)
    following.core.plan("w")
    (alone,) = following.core.workers["w"].running.values()
    assert alone.request == "r0/0"
    (refusal,) = following.core.remove_worker("w", 0)
    assert refusal.sequence is alone


async def test_waiting_sequences_are_handed_over_at_once_and_all_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handover, "TURN_S", 0.01)
    cell = Cell(tokenizer(OURS, OTHER))
    for number in range(1, 6):
        cell.add(f"r{number}", 0)
    cell.core.plan("w")
    await cell.others.hand_over_all(within_s=0.02)
    assert not cell.core.sequences
    (all_lost,) = cell.lost
    assert [len(each.keys) for each in all_lost] == [4, 1, 1]


def busy(num_running: int, num_waiting: int = 0, num_free_blocks: int = 16) -> Overview:
    """Another cell, with one worker."""
    return Overview("other", 1, num_running, num_waiting, 16, num_free_blocks, num_slots=8)


async def test_first_waiting_sequences_move_to_free_slots_before_moved_ones() -> None:
    cell = Cell(tokenizer(OURS, busy(2)), tokenizer(OURS, EMPTY))
    cell.core.plan("w")  # runs r0 and r1, two choices each
    cell.add("moved", 0, attempt=5)
    for name in ("a", "b", "c", "d"):
        cell.add(name, 0)
    cell.add("late", 0, now_s=0.5)
    cell.others.move_waiting(0.9)
    assert cell.lost == [[], []], "they have not waited for long"
    cell.others.move_waiting(1.0)
    moved = Lost([RequestKey(name, 1) for name in ("a", "b", "c")], True, "us")
    assert cell.lost == [[moved], []], "six slots are free"
    cell.others.move_waiting(2.0)
    assert cell.lost == [[], []], "the tokenizer does not know yet that they are taken"
    cell.tokenizers[0].status = tokenizer(OURS, busy(4)).status
    cell.others.move_waiting(2.5)
    assert cell.lost == [[Lost([RequestKey("d", 1), RequestKey("late", 1)], True, "us")], []]
    cell.others.move_waiting(4.9)
    assert cell.lost == [[], []]
    cell.others.move_waiting(5.0)
    assert cell.lost == [[Lost([RequestKey("moved", 5)], True, "us")], []]
    names = ["r0/0", "r0/1", "r1/0", "r1/1"]
    assert sorted(name for name, _ in cell.core.sequences) == names


@pytest.mark.parametrize(
    "other",
    [busy(8), busy(4, num_waiting=3), busy(2, num_free_blocks=0), OURS, LEAVING],
    ids=["full", "a slot for a prompt of two", "no blocks", "no other", "it leaves"],
)
async def test_a_sequence_without_room_elsewhere_waits_here(other: Overview) -> None:
    cell = Cell(tokenizer(OURS, other))
    cell.others.move_waiting(60.0)
    assert cell.lost == [[]]


async def test_a_part_of_the_slots_is_left_to_other_cells() -> None:
    full = Overview("third", 1, 8, 5, 16, 0, num_slots=8)
    cell = Cell(tokenizer(OURS, busy(0), full))
    for name in ("a", "b", "c"):
        cell.add(name, 0)
    cell.others.move_waiting(60.0)
    assert cell.lost == [[Lost([RequestKey("r0", 1), RequestKey("a", 1)], True, "us")]]

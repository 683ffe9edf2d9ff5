"""Prompts that wait for an adapter, and other cells."""

from services.scheduler.cells.handover import CellHandover
from services.scheduler.tokens_message import Forwarding
from shared.wire.messages import (
    PROTOCOL_MAJOR,
    PROTOCOL_MINOR,
    Heartbeat,
    Hello,
    Lost,
    Overview,
    State,
)
from tests.mesh.arena_parts import FakePeer
from tests.services.scheduler.adapters.test_room import A, B, Cell


async def test_a_sequence_that_waits_for_an_adapter_stays_in_its_cell():
    cell = Cell(max_adapters=1)
    overview = Overview("other", 1, 0, 0, 256, 256, num_slots=8)
    tokenizer = FakePeer(Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "tokenizer", "t"))
    tokenizer.status = Heartbeat(State.READY, "", 0, 0, overview=overview)
    others = CellHandover(cell.core, {0: Forwarding(tokenizer, 0.01)}, "us", lambda: None)
    cell.add(A, max_tokens=100)
    cell.step()
    cell.add(B)
    for _ in range(7):
        cell.add(A)
    full = cell.add(A)
    cell.step()
    others.move_waiting(60.0)
    moved = [key.request for each, _ in tokenizer.take(Lost) for key in each.keys]
    assert moved == [full], "it waits for a slot"

"""Grants of one turn of the loop are one message to each peer."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from shared.link.credit import CreditBatch
from shared.wire.messages import Credit, Grant


@dataclass(eq=False)
class Below(Any):
    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(message)


async def test_grants_of_one_turn_are_one_message_to_each_peer():
    credits, one, other = CreditBatch(), Below(), Below()
    for number in range(256):
        credits.add(one, Grant(f"r/{number}", 1, 300, 0))
    credits.add(one, Grant("r/0", 1, 428, 0))
    credits.add(other, Grant("r/0", 1, 300, 0))
    assert one.sent == other.sent == []
    await asyncio.sleep(0)
    (message,) = one.sent
    assert len(message.grants) == 256
    assert Grant("r/0", 1, 428, 0) in message.grants
    assert other.sent == [Credit([Grant("r/0", 1, 300, 0)])]
    credits.add(one, Grant("r/0", 1, 556, 0))
    await asyncio.sleep(0)
    assert one.sent[1:] == [Credit([Grant("r/0", 1, 556, 0)])]

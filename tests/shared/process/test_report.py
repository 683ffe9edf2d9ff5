"""Requests for reports, and their answers."""

from dataclasses import dataclass, field
from typing import Any

from shared.process.report import PATIENCE_S, Inquiries
from shared.wire.messages import PROTOCOL_MAJOR, PROTOCOL_MINOR, Hello

GATEWAY = Hello(PROTOCOL_MAJOR, PROTOCOL_MINOR, "gateway", "g")


@dataclass(eq=False)
class Asker(Any):
    is_up: bool = True
    hello: Hello = GATEWAY
    sent: list[Any] = field(default_factory=list)

    def send(self, message: Any) -> None:
        self.sent.append(message)


def test_an_asker_is_forgotten_when_it_is_gone_or_its_time_is_over():
    """Also where no report ever comes."""
    inquiries, gone, late, last = Inquiries(), Asker(), Asker(), Asker()
    for asker in (gone, late):
        inquiries.ask(asker, [], 0.0)
    gone.is_up = False
    inquiries.ask(last, [], PATIENCE_S)
    assert [*inquiries._asked_s] == [late, last]
    inquiries.ask(last, [], PATIENCE_S + 1)
    assert [*inquiries._asked_s] == [last]

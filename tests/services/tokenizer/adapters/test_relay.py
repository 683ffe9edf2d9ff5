"""Adapters between gateways and schedulers."""

import numpy as np
import pytest
from msgspec.structs import replace

from services.tokenizer.adapters.relay import AdapterRelay
from services.tokenizer.schedulers import Schedulers
from shared.errors import ADAPTER_LOST, Unavailable
from shared.link.extension import is_taken
from shared.wire.envelope import RequestOptions
from shared.wire.messages import (
    ADAPTERS_MINOR,
    PROTOCOL_MAJOR,
    Adapter,
    Adapters,
    Generate,
    Heartbeat,
    Hello,
    LoadAdapter,
    Message,
    NewSequence,
    Overview,
    SamplingParams,
    ServiceName,
    State,
    UnloadAdapter,
)
from tests.mesh.arena_parts import FakePeer

SQL = Adapter(name="sql", digest="1" * 32, loaded_s=1.0)
LAW = Adapter(name="law", digest="2" * 32, loaded_s=1.0)
ORDERS: list[Message] = [LoadAdapter("l1", "sql", "sql"), UnloadAdapter("sql", "u1")]
IDS = np.arange(5, dtype=np.int32)


class Tokenizer:
    def __init__(self) -> None:
        self.schedulers = Schedulers()
        self.relay = AdapterRelay(self.schedulers)

    def connect(self, service: ServiceName, name: str, minor: int = ADAPTERS_MINOR) -> FakePeer:
        peer = FakePeer(Hello(PROTOCOL_MAJOR, minor, service, name))
        if service == "scheduler":
            self.schedulers.add(peer)
        self.relay.on_up(peer)
        return peer

    def lose(self, scheduler: FakePeer) -> None:
        self.schedulers.remove(scheduler)
        self.relay.on_down(scheduler)

    def choose(self, adapter: str, number: int = 0, left: str = "") -> str:
        name = f"r{number}"
        generate = Generate(name, 1, SamplingParams(0), [NewSequence(f"{name}/0")])
        options = RequestOptions(adapter=adapter, left_scheduler=left)
        chosen = self.schedulers.choose(generate, options, IDS)
        assert chosen is not None
        return chosen.hello.instance


def lists_of(gateway: FakePeer) -> list[list[Adapter]]:
    return [each.adapters for each, _ in gateway.take(Adapters)]


def test_gateways_get_the_joined_list_first_and_on_changes_alone():
    tokenizer = Tokenizer()
    early, one, two = (
        tokenizer.connect("gateway", "early"),
        tokenizer.connect("scheduler", "one"),
        tokenizer.connect("scheduler", "two"),
    )
    assert not early.got
    for _ in range(2):
        assert tokenizer.relay.takes(one, Adapters([SQL]))
    assert tokenizer.relay.takes(two, Adapters([SQL, LAW]))
    both = [LAW, replace(SQL, num_workers=2)]
    assert lists_of(early) == [[SQL], both]
    late, old = tokenizer.connect("gateway", "late"), tokenizer.connect("gateway", "old", 8)
    assert lists_of(late) == [both]
    tokenizer.lose(two)
    assert lists_of(early) == lists_of(late) == [[SQL]]
    assert not old.got


def test_orders_go_to_all_schedulers_that_know_them():
    tokenizer = Tokenizer()
    gateway, old = tokenizer.connect("gateway", "g"), tokenizer.connect("scheduler", "old", 8)
    peers = [tokenizer.connect("scheduler", name) for name in "ab"]
    for order in ORDERS:
        assert is_taken([tokenizer.relay], gateway, order)
    assert [[each for each, _ in peer.got] for peer in peers] == [ORDERS, ORDERS]
    assert not old.got


def test_messages_from_the_wrong_side_are_not_taken():
    tokenizer = Tokenizer()
    gateway, scheduler = tokenizer.connect("gateway", "g"), tokenizer.connect("scheduler", "s")
    assert not tokenizer.relay.takes(gateway, Adapters([SQL]))
    assert not any(tokenizer.relay.takes(scheduler, order) for order in ORDERS)


def test_a_prompt_goes_to_a_cell_with_its_adapter():
    tokenizer = Tokenizer()
    one, two = tokenizer.connect("scheduler", "one"), tokenizer.connect("scheduler", "two")
    tokenizer.relay.takes(one, Adapters([SQL]))
    tokenizer.relay.takes(two, Adapters([LAW, replace(SQL, digest="3" * 32, is_retired=True)]))
    numbers = range(20)
    assert {tokenizer.choose("", number) for number in numbers} == {"one", "two"}
    assert {tokenizer.choose(SQL.digest, number) for number in numbers} == {"one"}
    assert {tokenizer.choose(LAW.digest, number) for number in numbers} == {"two"}
    assert tokenizer.choose("3" * 32) == "two", "an open request may have it"
    assert tokenizer.choose(SQL.digest, left="one") == "one", "there is no other"


def test_a_leaving_cell_with_the_adapter_is_better_than_a_staying_one_without():
    tokenizer = Tokenizer()
    one, _ = tokenizer.connect("scheduler", "one"), tokenizer.connect("scheduler", "two")
    tokenizer.relay.takes(one, Adapters([SQL]))
    leaving = Overview("one", 1, 0, 0, 1, 1, is_leaving=True)
    one.status = Heartbeat(State.READY, "", 0, 0, overview=leaving)
    assert tokenizer.choose("") == "two"
    assert tokenizer.choose(SQL.digest) == "one"


def test_without_a_cell_for_its_adapter_a_prompt_fails():
    tokenizer = Tokenizer()
    generate = Generate("r", 1, SamplingParams(0), [NewSequence("r/0")])
    options = RequestOptions(adapter=SQL.digest)
    assert tokenizer.schedulers.choose(generate, options, IDS) is None, "there is no scheduler"
    tokenizer.relay.takes(tokenizer.connect("scheduler", "s"), Adapters([LAW]))
    with pytest.raises(Unavailable, match=SQL.digest) as error:
        tokenizer.schedulers.choose(generate, options, IDS)
    assert error.value.code == ADAPTER_LOST

"""Conversions are counted, refused above the limit, and cancelled when their client leaves."""

import asyncio
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from services.tokenizer.lanes import Lanes
from services.tokenizer.requests import Requests
from services.tokenizer.text_model import TextModel
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import (
    Convert,
    Converted,
    Credit,
    Failed,
    Grant,
    RequestKey,
)
from tests.services.tokenizer.one_scheduler import OneScheduler
from tests.services.tokenizer.test_deliver import FakePeer
from tests.services.tokenizer.test_requests import submitted

TEXT = np.frombuffer(b"Who leads the shoal?", np.uint8)


class SlowModel(TextModel):
    """Encodes when it ``may_go_on``, and counts."""

    def __init__(self) -> None:
        super().__init__(EMBEDDED_MODEL, 100, 8192)
        self.may_go_on = threading.Event()
        self.num_encoded = 0

    def encode(self, *args: Any, **options: Any) -> np.ndarray:
        self.may_go_on.wait(20)
        self.num_encoded += 1
        return super().encode(*args, **options)


@pytest.fixture
def model() -> SlowModel:
    return SlowModel()


def convert(requests: Requests, gateway: FakePeer, name: str) -> None:
    requests.convert(gateway, Convert(name, "text", True), TEXT)


async def test_conversions_count_among_the_open_requests_and_are_refused_above_the_limit(
    model: SlowModel,
):
    gateway, other = FakePeer(), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(model, None, 3, Lanes(1), tasks, OneScheduler(None))
        for name in ("c0", "c1"):
            convert(requests, gateway, name)
        convert(requests, other, "c0")  # of another gateway
        convert(requests, other, "c2")
        (failed,) = other.sent
        assert isinstance(failed, Failed)
        assert (failed.request, failed.attempt, failed.status) == ("c2", 0, 429)
        assert failed.retry_after_s
        assert len(requests) == 3
        idle = tasks.create_task(requests.idle())
        await asyncio.sleep(0)
        assert not idle.done()  # a drain waits for them
        model.may_go_on.set()
    assert len(requests) == 0
    assert [message.request for message, _ in gateway.sent] == ["c0", "c1"]
    assert all(isinstance(message, Converted) for message, _ in gateway.sent)


async def test_a_cancelled_conversion_does_not_begin(model: SlowModel):
    gateway, leaving = FakePeer(), FakePeer()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(model, None, 10, Lanes(1), tasks, OneScheduler(None))
        for name in ("c0", "c1", "c2"):
            convert(requests, gateway, name)
        convert(requests, leaving, "c3")
        await asyncio.sleep(0.01)  # c0 has begun
        requests.cancel(leaving, [RequestKey("c2", 0)])  # it belongs to another gateway
        requests.cancel(gateway, [RequestKey("c1", 0), RequestKey("unknown", 0)])
        requests.lose(leaving)
        assert len(requests) == 2
        model.may_go_on.set()
    assert [message.request for message, _ in gateway.sent] == ["c0", "c2"]
    assert leaving.sent == []
    assert (model.num_encoded, len(requests)) == (2, 0)


async def test_a_flood_of_leavers_leaves_nothing_behind(model: SlowModel):
    """During a conversion of any length."""
    gateway, kept = FakePeer(), []
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(model, None, 10, Lanes(1), tasks, OneScheduler(None))
        convert(requests, gateway, "c0")
        for number in range(1000):
            data = TEXT.copy()
            kept.append(weakref.ref(data))
            requests.convert(gateway, Convert(f"leaver-{number}", "text", True), data)
            del data
            await asyncio.sleep(0)
            requests.cancel(gateway, [RequestKey(f"leaver-{number}", 0)])
        await asyncio.sleep(0.01)
        assert len(requests) == 1
        assert sum(each() is not None for each in kept) == 0
        model.may_go_on.set()
    assert (model.num_encoded, len(gateway.sent)) == (1, 1)


async def test_grants_of_one_turn_go_down_together_and_only_to_ones_own(model: SlowModel):
    gateway, other, scheduler = FakePeer(), FakePeer(), FakePeer()
    model.may_go_on.set()
    async with asyncio.TaskGroup() as tasks:
        requests = Requests(model, None, 10, Lanes(1), tasks, OneScheduler(scheduler))
        for name in ("a", "b"):
            requests.submit(gateway, *submitted(name))
    scheduler.sent.clear()
    requests.grant(gateway, [Grant("a/0", 1, 300, 0)])
    requests.grant(gateway, [Grant("b/0", 1, 300, 0), Grant("a/0", 1, 400, 0)])
    requests.grant(gateway, [Grant("a/x", 1, 1, 1), Grant("a/" + "9" * 300, 1, 1, 1)])
    requests.grant(other, [Grant("b/0", 1, 999, 0)])
    await asyncio.sleep(0)
    assert scheduler.sent == [Credit([Grant("a/0", 1, 400, 0), Grant("b/0", 1, 300, 0)])]

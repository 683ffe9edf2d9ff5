"""An API key's share of the gateway's time."""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.gateway.http.fair_time import (
    ACTIVE_S,
    BURST_S,
    MAX_DEBT_S,
    SHARE,
    FairTime,
    FairTurns,
    on_thread,
)


def fair_time(*keys: str) -> FairTime:
    """All owners have asked at 0."""
    fair = FairTime()
    for key in keys:
        assert fair.wait_s(key, 0.0) == 0
    return fair


def test_a_key_alone_never_waits():
    fair = fair_time("a")
    fair.charge("a", 100.0, 1.0)
    assert fair.wait_s("a", 1.0) == 0


def test_a_key_that_has_used_up_its_share_waits_beside_another():
    fair = fair_time("a", "b")
    fair.charge("a", BURST_S + 0.1, 0.0)
    assert fair.wait_s("a", 0.0) == pytest.approx(0.1 / SHARE)
    assert fair.wait_s("a", 0.1 / SHARE) == pytest.approx(0, abs=1e-9)
    assert fair.wait_s("b", 0.0) == 0


def test_another_key_counts_for_some_time_after_its_last_request():
    fair = fair_time("a", "b")
    now_s = ACTIVE_S - 1
    fair.charge("a", 1.0, now_s)
    assert fair.wait_s("a", now_s) > 0
    fair.charge("a", 1.0, now_s + 1)
    assert fair.wait_s("a", now_s + 1) == 0


def test_time_a_key_used_alone_delays_it_only_briefly():
    fair = fair_time("a")
    fair.charge("a", 1000.0, 0.0)
    fair.wait_s("b", 0.0)
    assert 0 < fair.wait_s("a", 0.0) <= MAX_DEBT_S / SHARE


class TestFairTurns:
    async def test_the_loop_and_threads_are_charged(self):
        turns, charged = FairTurns(), list[float]()
        turns._time.charge = lambda key, spent_s, now_s: charged.append(spent_s)  # type: ignore[method-assign]

        def work() -> None:
            until_s = time.thread_time() + 0.01
            while time.thread_time() < until_s:
                pass

        async def handle() -> str:
            work()
            await asyncio.sleep(0.01)
            with ThreadPoolExecutor(1) as threads:
                await on_thread(threads, work)
            return "done"

        assert await turns.run("a", handle()) == "done"
        assert sum(charged) >= 0.02

    async def test_errors_and_cancellations_pass(self):
        turns = FairTurns()

        async def fail() -> None:
            try:
                await asyncio.sleep(0 if is_broken else 60)
            finally:
                ends.append(is_broken)
            raise ValueError("broken")

        ends, is_broken = list[bool](), True
        with pytest.raises(ValueError, match="broken"):
            await turns.run("a", fail())
        is_broken = False
        task = asyncio.create_task(turns.run("a", fail()))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ends == [True, False]

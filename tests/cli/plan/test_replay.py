from dataclasses import dataclass

import msgspec
import pytest

from cli.plan.replay import Replay
from cli.plan.requests import Request, at_rate, made_up
from cli.plan.sizing import enough_workers, objections
from cli.plan.speed import ON_CORES_OF_ITS_OWN, MeshTimes, StepTimes
from shared.wire.messages import Capacity


@dataclass(frozen=True)
class ByTokens:
    """A step takes a second for each ten prompt tokens and for each row it decodes."""

    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float:
        return num_rows + num_prompt_tokens / 10


CAPACITY = Capacity(
    num_blocks=100, block_size=16, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=512
)


@dataclass(frozen=True)
class Steady:
    """Each step takes a millisecond."""

    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float:
        return 1e-3


def replay(
    num_workers: int,
    capacity: Capacity = CAPACITY,
    times: StepTimes = ByTokens(),
    mesh: MeshTimes = ON_CORES_OF_ITS_OWN,
) -> Replay:
    return Replay(capacity, times, mesh, num_workers)


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    played = replay(1).run([Request(100, 5, 3.0)])
    (outcome,) = played.outcomes
    assert outcome.num_tokens == 5
    assert outcome.ttft_s == pytest.approx(10.0)  # chunks of 40, 40 and 20 tokens
    assert outcome.tpot_s == pytest.approx(1.0)
    assert played.duration_s == pytest.approx(14.0)


@pytest.mark.parametrize(("max_num_steps", "fewest", "most"), [(1, 60, 60), (16, 2, 30)])
def test_a_mesh_on_shared_cores_takes_its_time_of_plans_and_of_tokens(
    max_num_steps: int, fewest: int, most: int
) -> None:
    capacity = msgspec.structs.replace(CAPACITY, max_num_steps=max_num_steps)

    def duration_s(mesh: MeshTimes) -> float:
        return replay(1, capacity, Steady(), mesh).run(made_up([10] * 2, [60] * 2), 2).duration_s

    alone_s = duration_s(ON_CORES_OF_ITS_OWN)
    assert alone_s == pytest.approx(60e-3)
    num_plans = round(duration_s(MeshTimes(1.0, 0.0)) - alone_s)
    assert fewest <= num_plans <= most
    assert duration_s(MeshTimes(0.0, 1.0)) - alone_s == pytest.approx(2 * 60)


def test_so_many_are_open_at_once_as_asked_for() -> None:
    played = replay(1).run(made_up([10] * 6, [3] * 6), concurrency=2)
    assert [each.num_tokens for each in played.outcomes] == [3] * 6
    assert played.num_open == pytest.approx(2.0, rel=0.1)


def test_twice_the_workers_take_half_the_time() -> None:
    requests = made_up([10] * 32, [20] * 32)
    one = replay(1).run(requests, concurrency=16)
    two = replay(2).run(requests, concurrency=16)
    assert two.output_tokens_per_s == pytest.approx(2 * one.output_tokens_per_s, rel=0.1)


def test_a_small_kv_cache_preempts_and_every_token_comes_all_the_same() -> None:
    small = Capacity(
        num_blocks=12, block_size=16, max_num_seqs=8, max_num_batched_tokens=40, max_model_len=128
    )
    played = replay(1, small).run(made_up([30] * 8, [60] * 8), concurrency=8)
    assert played.num_preemptions > 0
    assert [each.num_tokens for each in played.outcomes] == [60] * 8


def test_a_request_that_no_worker_can_take_is_an_error_and_others_go_on() -> None:
    played = replay(1).run([Request(600, 5, 0.0), Request(10, 5, 0.0)])
    assert "600" in played.outcomes[0].error
    assert played.outcomes[1].num_tokens == 5
    at_once = replay(1).run(made_up([600] * 4 + [10] * 6, [5] * 10), concurrency=2)
    assert [each.num_tokens for each in at_once.outcomes] == [0] * 4 + [5] * 6


def test_the_smallest_number_of_workers_that_keeps_up_is_found() -> None:
    # Each alone takes 9 s of prefill and decoding, so one per second needs at least nine workers.
    requests = at_rate(made_up([40] * 60, [5] * 60), 1.0)

    def play(num_workers: int):
        return replay(num_workers).run(requests)

    targets_ms = {"ttft": 15_000.0}
    found = enough_workers(play, targets_ms)
    assert not found.problem
    assert found.num > 1
    assert not objections(play(found.num), targets_ms)
    assert objections(play(found.num - 1), targets_ms)


def test_targets_that_a_request_alone_misses_end_the_search_at_once() -> None:
    requests = at_rate(made_up([40] * 30, [5] * 30), 0.2)
    nums = []

    def play(num_workers: int):
        nums.append(num_workers)
        return replay(num_workers).run(requests)

    found = enough_workers(play, {"tpot": 500.0})
    assert "0.0% met the targets" in found.problem
    assert max(nums) <= 16


def test_a_request_that_no_worker_can_take_is_no_reason_for_more_workers() -> None:
    requests = [Request(600 if i == 5 else 40, 5, 100.0 * i) for i in range(20)]
    found = enough_workers(lambda num: replay(num).run(requests), {"ttft": 15_000.0})
    assert (found.num, found.problem) == (1, "")

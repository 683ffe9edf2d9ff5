"""The share of later sequences in a worker's time, next to earlier ones."""

from itertools import pairwise

import pytest

from services.scheduler.later_share.later_share import LONGEST_PERIOD, PERIOD
from services.scheduler.sequence import WaitReason
from tests.services.scheduler.step_bench import LATER, SHARE, Bench, on_a_cpu, on_a_gpu


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_later", [1, 16, 60])
def test_a_stream_is_slowed_by_no_more_than_the_share_and_the_batch_gets_it(
    num_later: int, depth: int
) -> None:
    bench = Bench(on_a_cpu, depth)
    bench.add_batch(num_later)
    bench.run(30)
    bench.add("stream")
    bench.run(30)
    bench.times.clear()
    bench.run(1000)
    assert len(bench.times) == 1000
    limit = 1 / (1 - SHARE)
    assert 1 + 0.9 * (min(limit, 1 + 0.2 * num_later) - 1) < bench.slowdown() < 1.02 * limit


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("num_later", [1, 16, 60])
def test_a_stream_with_plans_of_several_steps_has_them_beside_a_batch_too(
    num_later: int, depth: int
) -> None:
    """The share is relative to the stream alone: plans of several steps, which cost less per
    step."""
    bench = Bench(on_a_cpu, depth, plan_s=0.001, max_num_steps=16)
    bench.add("stream")
    bench.run(30)
    alone_s = sum(step_s for step_s, _ in bench.times[-20:]) / 20
    bench.add_batch(num_later)
    bench.run(60)
    bench.times.clear()
    bench.tokens.clear()
    bench.run(1000)
    mean_s = sum(step_s for step_s, _ in bench.times) / len(bench.times)
    limit = 1 / (1 - SHARE)
    assert 1 + 0.8 * (limit - 1) < mean_s / alone_s < 1.02 * limit
    assert len(bench.times) - bench.num_joined > 2 * (len(bench.tokens) - bench.num_joined)
    assert sum(bench.tokens) > 0


def test_a_plan_of_several_steps_delays_only_sequences_that_yield() -> None:
    bench = Bench(on_a_cpu, depth=1, max_num_steps=16, max_num_seqs=2)
    bench.add("one")
    bench.add("other")
    bench.run(10)
    bench.add_batch(1)
    bench.times.clear()
    bench.run(10)
    assert len(bench.times) > 20, "a batch waits"
    bench.add("third")
    bench.times.clear()
    bench.run(10)
    assert len(bench.times) == 10, "one like them waits, too"


def test_whoever_is_held_back_counts_the_steps_of_a_long_plan() -> None:
    bench = Bench(on_a_cpu, depth=1, max_num_steps=16)
    bench.add_batch(16)
    bench.step()
    bench.add("stream")
    bench.run(30)
    sequence = bench.core.sequences[f"{LATER} 0", 1]
    before = sequence.num_held_back
    bench.times.clear()
    bench.run(30)
    num_without = len(bench.times) - bench.num_joined
    assert num_without > 30
    assert sequence.num_held_back - before == num_without


def test_prompts_of_a_batch_come_in_pieces_and_end() -> None:
    bench = Bench(on_a_cpu)
    bench.add("stream")
    bench.run(30)
    bench.add_batch(12, num_prompt=1000, max_tokens=1)
    bench.times.clear()
    while len(bench.ended) < 12:
        bench.step()
    assert bench.slowdown() < 1.02 / (1 - SHARE)
    alone_s = min(step_s for step_s, _ in bench.times)
    longest_s = max(step_s for step_s, _ in bench.times)
    assert longest_s < alone_s * (1 + 1.5 * PERIOD * SHARE / (1 - SHARE)), "no chunk is long"


def test_later_sequences_without_cost_join_nearly_every_step() -> None:
    bench = Bench(on_a_gpu)
    bench.add("stream")
    bench.add_batch(16)
    bench.run(60)
    bench.times.clear()
    bench.run(300)
    assert bench.num_joined > 0.9 * len(bench.times)
    assert bench.slowdown() == pytest.approx(1)


def test_alone_a_batch_has_whole_steps_at_once_and_again_when_the_stream_has_ended() -> None:
    bench = Bench(on_a_cpu)
    bench.add_batch(4, num_prompt=2000, max_tokens=5)
    bench.step()
    bench.add("stream", max_tokens=40)
    while "stream" not in bench.ended:
        bench.step()
    assert bench.tokens[0] == 512
    beside = len(bench.tokens)
    while len(bench.ended) < 5:
        bench.step()
    assert max(bench.tokens[beside:]) == 512


def test_the_first_step_of_a_stream_is_its_own() -> None:
    bench = Bench(on_a_cpu, depth=1)
    bench.add_batch(8)
    for number in range(20):
        bench.run(20)
        bench.times.clear()
        bench.add(f"stream {number}", num_prompt=100, max_tokens=9)
        while f"stream {number}" not in bench.ended:
            bench.step()
        _, is_joined = bench.times[0]
        assert not is_joined


def test_whatever_the_times_say_one_of_so_many_steps_is_for_all() -> None:
    """A worker with a stopped clock."""
    bench = Bench(lambda num_prompt, num_decode: 0.0)
    bench.add("stream")
    bench.add_batch(2, max_tokens=10)
    while len(bench.ended) < 2:
        bench.step()
    joined = [index for index, (_, is_joined) in enumerate(bench.times) if is_joined]
    assert {later - before for before, later in pairwise(joined)} == {LONGEST_PERIOD}


def test_plans_of_several_steps_keep_a_batch_no_longer_by_more_than_one_of_them() -> None:
    bench = Bench(lambda num_prompt, num_decode: 0.0, max_num_steps=7)
    bench.add("stream")
    bench.add_batch(2, max_tokens=10)
    while len(bench.ended) < 2:
        bench.step()
    joined = [index for index, (_, is_joined) in enumerate(bench.times) if is_joined]
    periods = {later - before for before, later in pairwise(joined)}
    assert periods <= set(range(LONGEST_PERIOD, LONGEST_PERIOD + 7))
    assert len(bench.times) > len(bench.tokens) + 100


def test_a_batch_that_has_waited_long_enough_is_no_later_than_others() -> None:
    bench = Bench(on_a_cpu)
    bench.add_batch(1, num_prompt=4)
    bench.step()
    bench.now_s += 1001
    bench.add("stream")
    bench.run(10)
    bench.times.clear()
    bench.run(20)
    assert bench.num_joined == 20


def test_a_prompt_of_a_batch_in_the_middle_keeps_no_other_prompt_from_its_slot() -> None:
    bench = Bench(on_a_cpu, depth=1, max_num_batched_tokens=64)
    bench.add_batch(2, num_prompt=5000)
    bench.step()
    bench.add("long", num_prompt=300, max_tokens=1)
    bench.step()
    assert bench.core.sequences["long", 1].num_computed == 64


def test_a_wait_for_the_share_of_a_priority_is_reported() -> None:
    bench = Bench(on_a_cpu, depth=1)
    bench.add("stream")
    bench.step()
    bench.add_batch(8)
    bench.step()
    assert bench.core.wait_reason == WaitReason.LATER_PRIORITY
    bench.run(20)
    sequence = bench.core.sequences[f"{LATER} 0", 1]
    assert sequence.wait_reason == WaitReason.LATER_PRIORITY
    assert sequence.allocation is not None
    num_held_back = sequence.num_held_back
    bench.run(20)
    assert 10 < sequence.num_held_back - num_held_back < 20


def test_a_stream_whose_client_does_not_read_holds_nobody_back() -> None:
    bench = Bench(on_a_cpu)
    bench.add("stream")
    bench.add_batch(4)
    bench.run(20)
    stream = bench.core.sequences["stream", 1]
    stream.max_emitted = len(stream.emitted)
    bench.run(3)
    bench.tokens.clear()
    bench.run(20)
    assert bench.tokens == [4] * len(bench.tokens)


def test_for_a_second_after_a_stream_prompts_of_a_batch_come_in_pieces() -> None:
    bench = Bench(on_a_cpu)
    bench.add("stream", max_tokens=100)
    bench.add_batch(12, num_prompt=8000, max_tokens=1)
    while "stream" not in bench.ended:
        bench.step()
    ended_s, most = bench.now_s, bench.core.workers["w"].priority_share.max_tokens
    bench.tokens.clear()
    while bench.now_s < ended_s + 0.9:
        bench.step()
    assert max(bench.tokens) <= most + 2 < 512
    bench.run(100)
    assert max(bench.tokens) == 512


@pytest.mark.parametrize(("priority", "num_in_flight"), [(100, 1), (0, 2)])
def test_a_step_with_prompts_of_a_batch_alone_has_no_other_behind_it(
    priority: int, num_in_flight: int
) -> None:
    bench = Bench(on_a_cpu)
    bench.add("prompt", num_prompt=2000, priority=priority)
    while bench.core.plan("w"):
        pass
    assert len(bench.core.workers["w"].in_flight) == num_in_flight

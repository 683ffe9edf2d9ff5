"""Streams keep their promised time per token next to prompts."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from services.scheduler.promises.stream_share import BURST_S, MIN_SHARE, SHORT_BURST_S
from services.scheduler.sequence import WaitReason
from shared.wire.envelope import Promise
from shared.wire.kv_groups import COPY_INTERVAL
from tests.services.scheduler.step_bench import Bench, on_a_cpu, on_a_gpu

LATE = 1.02
NUM_PROMPTS = 250


def on_a_small_model(num_prompt: int, num_decode: int) -> float:
    return 0.0004 + 0.0001 * num_decode + 0.00005 * num_prompt


COSTS = {"cpu": on_a_cpu, "gpu": on_a_gpu, "small model": on_a_small_model}


def beside_prompts(
    cost: str,
    num_streams: int = 1,
    depth: int = 2,
    promise: Promise | None = None,
    **options: float,
) -> Bench:
    """``num_streams`` streams after 250 steps next to cold prompts."""
    bench = Bench(COSTS[cost], depth, max_num_steps=16, **options)
    for number in range(num_streams):
        bench.add(f"stream {number}", promise=promise)
    bench.run(30)
    for number in range(NUM_PROMPTS):
        bench.add(f"prompt {number}", num_prompt=1500, max_tokens=1)
    bench.run(100)
    bench.rows.clear()
    bench.run(250)
    assert len(bench.core.queues.waiting) > 0
    return bench


def per_token_s(bench: Bench) -> float:
    return sum(step_s for _, _, step_s in bench.rows) / len(bench.rows)


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("cost", COSTS)
def test_streams_keep_half_of_their_rate(cost: str, num_streams: int, depth: int) -> None:
    bench = beside_prompts(cost, num_streams, depth)
    own_s = COSTS[cost](0, num_streams)
    assert {num for _, num, _ in bench.rows} <= {num_streams, num_streams + 1}, "a last token"
    assert 1.7 * own_s < per_token_s(bench) < LATE * 2 * own_s
    longest_s = max(step_s for _, _, step_s in bench.rows)
    assert longest_s < 1.1 * max(BURST_S, 2 * own_s)


def test_prompts_share_long_steps_with_streams_and_take_turns_with_short_ones() -> None:
    promise = Promise(tpot_ms=20)
    pieces = [num_tokens for num_tokens, _, _ in beside_prompts("gpu", promise=promise).rows]
    assert sum(map(bool, pieces)) > 0.97 * len(pieces)
    pieces = [num_tokens for num_tokens, _, _ in beside_prompts("small model").rows]
    assert 0 < sum(map(bool, pieces)) < len(pieces) / 8
    assert max(pieces) > 200, "short steps cost more per token"


@pytest.mark.parametrize("tpot_ms", [8, 50])
def test_a_stream_keeps_its_own_promise(tpot_ms: float) -> None:
    bench = beside_prompts("cpu", promise=Promise(tpot_ms=tpot_ms))
    assert 0.8 * tpot_ms < 1000 * per_token_s(bench) < LATE * tpot_ms
    longest_s = max(step_s for _, _, step_s in bench.rows)
    assert 1000 * longest_s < 1.25 * max(10, tpot_ms)


def test_the_tightest_promise_counts() -> None:
    bench = Bench(on_a_cpu)
    for name, tpot_ms in (("loose", 100), ("tight", 10)):
        bench.add(name, promise=Promise(tpot_ms=tpot_ms))
    bench.run(30)
    bench.add("prompt", num_prompt=20_000, max_tokens=1)
    bench.run(20)
    bench.rows.clear()
    bench.run(200)
    assert 1000 * per_token_s(bench) < LATE * 10


def test_prompts_get_a_share_although_a_promise_is_broken_without_them() -> None:
    bench = beside_prompts("cpu", promise=Promise(tpot_ms=0.1))
    own_s = on_a_cpu(0, 1)
    assert per_token_s(bench) < LATE * own_s / (1 - MIN_SHARE)
    assert sum(num_tokens for num_tokens, _, _ in bench.rows) > 0.05 * len(bench.rows)


def test_without_a_rate_prompts_come_first() -> None:
    bench = beside_prompts("cpu", stream_rate=0)
    assert sum(num_tokens + 1 == 512 for num_tokens, _, _ in bench.rows) > 0.95 * len(bench.rows)


def test_a_lone_prompt_next_to_a_rested_stream_starts_at_once() -> None:
    bench = Bench(on_a_small_model, max_num_steps=16)
    bench.add("stream")
    bench.run(50)
    bench.add("first", num_prompt=300, max_tokens=1)
    bench.run(10)
    bench.add("second", num_prompt=300, max_tokens=1)
    bench.rows.clear()
    bench.run(3)
    assert (300, 1) in [row[:2] for row in bench.rows], "in one step"


def test_streams_that_began_beside_prompts_keep_their_rate_too() -> None:
    bench = Bench(on_a_cpu)
    for number in range(NUM_PROMPTS):
        bench.add(f"prompt {number}", num_prompt=1500, max_tokens=1)
    bench.run(10)
    bench.add("stream", num_prompt=10)
    while "stream" not in {each.request for each in bench.core.workers["w"].running.values()}:
        bench.step()
    bench.run(200)
    bench.rows.clear()
    bench.run(250)
    assert per_token_s(bench) < LATE * 2 * on_a_cpu(0, 1)


def test_a_batch_next_to_prompts_of_a_batch_has_no_promise() -> None:
    bench = Bench(on_a_cpu)
    bench.add("decodes", priority=100)
    bench.run(30)
    bench.add("prompt", num_prompt=20_000, max_tokens=1, priority=100)
    bench.rows.clear()
    bench.run(20)
    assert sum(num_tokens == 511 for num_tokens, _, _ in bench.rows) > 15


@pytest.mark.parametrize("shape", [{"num_prompt": 1500, "max_tokens": 1}, {"max_tokens": 400}])
@pytest.mark.parametrize("cost", COSTS)
def test_a_batch_keeps_a_promise_that_leaves_less_than_its_share(
    cost: str, shape: dict[str, Any]
) -> None:
    own_s = COSTS[cost](0, 1)
    bench = Bench(COSTS[cost], max_num_steps=16)
    bench.add("stream", promise=Promise(tpot_ms=1000 * own_s * 1.16))
    bench.run(100)
    for number in range(60):
        bench.add(f"later {number}", priority=100, **shape)
    bench.run(150)
    bench.rows.clear()
    bench.run(300)
    assert per_token_s(bench) < LATE * own_s * 1.16
    assert sum(num_tokens + num - 1 for num_tokens, num, _ in bench.rows) > 800, "of the batch"


def test_held_back_prompts_and_their_reason_show() -> None:
    bench = beside_prompts("small model", depth=1)
    while bench.core.wait_reason != WaitReason.PROMISE:
        bench.step()
    running = bench.core.workers["w"].running.values()
    assert any(each.num_held_back > 0 for each in running)


@pytest.mark.parametrize(("num_streams", "num_steps"), [(0, 20), (1, 100)])
def test_steps_are_short_while_several_keys_send_requests(num_streams: int, num_steps: int) -> None:
    bench = Bench(on_a_small_model)
    for number in range(num_streams):
        bench.add(f"stream {number}", owner="hostile")
    bench.run(num_steps * num_streams)
    for number in range(NUM_PROMPTS):
        bench.add(f"prompt {number}", num_prompt=1500, max_tokens=1, owner="hostile")
    bench.run(num_steps)
    bench.rows.clear()
    bench.run(num_steps)
    assert max(num_tokens for num_tokens, _, _ in bench.rows) > 400
    bench.add("polite", max_tokens=1, owner="polite")
    bench.run(num_steps)
    assert "polite" in bench.ended
    bench.rows.clear()
    bench.run(num_steps)
    assert max(step_s for _, _, step_s in bench.rows) < 1.1 * SHORT_BURST_S
    bench.run(25 * num_steps)
    bench.rows.clear()
    bench.run(num_steps)
    assert max(num_tokens for num_tokens, _, _ in bench.rows) > 400, "the other key has left"


def disturbed(part: float, factor: int) -> Callable[[int, int], float]:
    """Interference multiplies the time of this ``part`` of the steps."""
    random = Random(1)

    def cost_s(num_prompt: int, num_decode: int) -> float:
        own_s = on_a_cpu(num_prompt, num_decode)
        return own_s * factor if random.random() < part else own_s

    return cost_s


def test_a_short_prompt_waits_neither_for_a_debt_nor_for_long_prompts() -> None:
    bench = Bench(disturbed(0.05, 8))
    for number in range(4):
        bench.add(f"stream {number}", owner="hostile")
    bench.run(50)
    for number in range(NUM_PROMPTS):
        bench.add(f"prompt {number}", num_prompt=1500, max_tokens=1, owner="hostile")
    bench.run(50)
    waits = []
    for number in range(20):
        bench.run(number)
        num_rows = len(bench.rows)
        bench.add(f"polite {number}", num_prompt=4, max_tokens=1, owner="polite")
        polite = bench.core.sequences[f"polite {number}", 1]
        while polite.allocation is None:
            bench.step()
        waits.append(len(bench.rows) - num_rows)
    assert max(waits) == 1, "the next plan has it"
    assert min(num_tokens for num_tokens, _, _ in bench.rows) == 0, "long ones wait"


def test_prompts_get_a_share_although_streams_never_earn_their_promise() -> None:
    bench = Bench(disturbed(0.7, 2))
    bench.add("stream", promise=Promise(tpot_ms=0.1))
    bench.run(50)
    bench.add("prompt", num_prompt=1000, max_tokens=1)
    bench.run(2000)
    assert "prompt" in bench.ended


def test_prompts_of_models_with_states_are_cut_at_multiples_of_the_copies() -> None:
    bench = Bench(on_a_cpu, num_states=0)
    bench.add("stream")
    bench.run(30)
    bench.add("prompt", num_prompt=5000, max_tokens=1)
    ends = []
    sequence = bench.core.sequences["prompt", 1]
    while sequence.num_to_compute > 1:
        bench.step()
        ends.append(sequence.num_computed)
    assert len(set(ends)) > 8
    assert {end % COPY_INTERVAL for end in ends if end < 5000} == {0}

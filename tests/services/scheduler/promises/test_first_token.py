"""Refusals of requests whose first token would come later than promised, and kept promises."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.sequences import add_one, generate_one
from services.scheduler.extension import Cell, OtherCells
from services.scheduler.intake import Intake
from services.scheduler.promises.cell import PROMISES, CellPromises
from services.scheduler.promises.first_token import PROMISE_OUT_OF_REACH
from services.scheduler.results import Emission
from services.scheduler.sequence import Arrival, Ended
from shared.errors import InvalidRequest, Overloaded
from shared.process.rate import MEMORY_S, Rate
from shared.settings.scheduler import SchedulerConfig
from shared.wire.envelope import Promise
from shared.wire.messages import ResultRow, SamplingParams, TokenRun
from tests.services.scheduler.step_bench import Bench, on_a_cpu

TOKEN_S = 0.00015  # of a prompt, on_a_cpu
CONFIG = SchedulerConfig(mesh_dir=Path("/nonexistent"), instance="s")


def arrival(num_prompt: int, ttft_ms: float | None, attempt: int = 1, now_s: float = 0) -> Arrival:
    promise = Promise(ttft_ms=ttft_ms) if ttft_ms else None
    params = SamplingParams(seed=0, max_tokens=5)
    generate = generate_one("new", params, attempt, promise=promise)
    ids = np.arange(50_000, 50_000 + num_prompt, dtype=np.int32)
    return Arrival(generate=generate, prompt=ids, emitted=ids[:0], route=0, now_s=now_s)


def with_prompts(num: int, num_streams: int = 0, **fields: int) -> Bench:
    """A worker with measured steps, and ``num`` prompts of 1500 tokens."""
    bench = Bench(on_a_cpu, vocab_size=10_000_000, **fields)
    promises_of(bench, Rate())
    bench.add("warm", num_prompt=3000, max_tokens=20)
    while "warm" not in bench.ended:
        bench.step()
    for number in range(num_streams):
        bench.add(f"stream {number}")
    bench.run(20 if num_streams else 0)
    for number in range(num):
        bench.add(f"prompt {number}", num_prompt=1500, max_tokens=1)
    return bench


def promises_of(bench: Bench, ends: Rate) -> CellPromises:
    others = OtherCells(bench.core, {}, "s", lambda: None)
    bench.core.checks.clear()
    return CellPromises(Cell(CONFIG, bench.core, {}, others, lambda: None, ends))


def ends(per_s: float, now_s: float) -> Rate:
    """Of sequences that have ended for a long time."""
    rate = Rate()
    rate.start(now_s - 100 * MEMORY_S)
    rate.note(round(per_s * MEMORY_S), now_s)
    return rate


def refusal(
    bench: Bench, ttft_ms: float, attempt: int = 1, num_prompt: int = 600
) -> Overloaded | None:
    try:
        bench.core.add(arrival(num_prompt, ttft_ms, attempt, bench.now_s))
    except Overloaded as error:
        return error
    bench.core.cancel(("new", attempt))
    return None


def alone_ms(num_prompt: int) -> float:
    """A promise that an idle worker keeps."""
    return 1300 * (num_prompt * TOKEN_S + (1 + num_prompt // 512) * 0.003)


def predicted_s(bench: Bench, num_prompt: int = 600) -> float:
    error = refusal(bench, alone_ms(num_prompt), num_prompt=num_prompt)
    assert error is not None
    assert error.code == PROMISE_OUT_OF_REACH
    assert error.retry_after_s is not None
    return error.retry_after_s + alone_ms(num_prompt) / 1000


@pytest.mark.parametrize("num_streams", [0, 1])
def test_a_promise_out_of_reach_is_refused_with_the_time_until_it_is_not(num_streams: int) -> None:
    bench = with_prompts(4, num_streams)
    expected_s = (4 * 1500 + 600) * TOKEN_S * (2 if num_streams else 1)
    assert predicted_s(bench) == pytest.approx(expected_s, rel=0.3)
    assert refusal(bench, 1000 * expected_s * 1.3) is None


@pytest.mark.parametrize("num_streams", [0, 2])
@pytest.mark.parametrize("num_prompt", [128, 256, 600, 2000])
def test_the_predicted_time_is_that_of_the_first_token(num_prompt: int, num_streams: int) -> None:
    bench = with_prompts(6, num_streams)
    for number in range(8):
        bench.add(f"short {number}", num_prompt=128, max_tokens=1)
    expected_s = predicted_s(bench, num_prompt)
    start_s = bench.now_s
    bench.add("new", num_prompt=num_prompt, max_tokens=1)
    while "new" not in bench.ended:
        bench.step()
    assert bench.now_s - start_s == pytest.approx(expected_s, rel=0.3)


def test_a_later_attempt_and_a_request_without_a_promise_are_never_refused() -> None:
    bench = with_prompts(50)
    assert predicted_s(bench) > 10
    assert refusal(bench, alone_ms(600), attempt=2) is None
    bench.core.add(arrival(600, None, now_s=bench.now_s))


def test_a_promise_that_no_wait_would_help_is_accepted_and_missed() -> None:
    assert refusal(with_prompts(50), alone_ms(600) / 4) is None


def test_a_batch_that_yields_does_not_count() -> None:
    bench = with_prompts(0, max_num_seqs=4)
    for number in range(4):
        bench.add(f"running {number}", priority=100)
    bench.run(8)
    bench.add_batch(100, num_prompt=1500)
    assert len(bench.core.workers["w"].running) == 4
    promises_of(bench, ends(0.1, bench.now_s))
    bench.core.add(arrival(600, alone_ms(600) * 2, now_s=bench.now_s))


def test_cached_prefixes_do_not_count() -> None:
    bench = with_prompts(0)
    params = SamplingParams(seed=0, max_tokens=1)
    add_one(bench.core, "first", range(50_000, 56_000), params, bench.now_s)
    while "first" not in bench.ended:
        bench.step()
    for number in range(2):
        bench.add(f"short {number}", num_prompt=200, max_tokens=1)
    bench.core.add(arrival(6000, 200, now_s=bench.now_s))


def test_the_wait_for_a_slot_counts() -> None:
    bench = with_prompts(0, num_streams=4, max_num_seqs=4)
    promises_of(bench, ends(0.5, bench.now_s))
    with pytest.raises(Overloaded) as caught:
        bench.core.add(arrival(10, 1000, now_s=bench.now_s))
    assert caught.value.retry_after_s == pytest.approx(1, rel=0.1)


def test_other_faults_of_a_request_come_first() -> None:
    with pytest.raises(InvalidRequest):
        with_prompts(50).core.add(arrival(40_000, 1))


def test_the_intake_tells_the_time_of_the_promise_and_counts() -> None:
    bench = with_prompts(50)
    intake = Intake(bench.core)
    before = PROMISES.labels("ttft", "refused")._value.get()
    with pytest.raises(Overloaded) as caught:
        intake.add(arrival(600, alone_ms(600), now_s=bench.now_s))
    assert caught.value.retry_after_s == pytest.approx(50 * 1500 * TOKEN_S, rel=0.3)
    assert PROMISES.labels("ttft", "refused")._value.get() == before + 1


@pytest.mark.parametrize(("ttft_ms", "tpot_ms"), [(90, 9), (110, 9), (90, 11), (110, 11)])
def test_kept_and_missed_promises_count(ttft_ms: float, tpot_ms: float) -> None:
    bench = Bench(on_a_cpu)
    bench.add("a", promise=Promise(ttft_ms=ttft_ms, tpot_ms=tpot_ms))
    sequence = bench.core.sequences["a", 1]
    names = [(time, outcome) for time in ("ttft", "tpot") for outcome in ("kept", "missed")]
    before = {name: PROMISES.labels(*name)._value.get() for name in names}
    promises = promises_of(bench, Rate())
    row = ResultRow(0, "a", 1, TokenRun(1))
    for now_s, num_tokens in ((0.1, 1), (0.12, 2), (0.15, 3)):
        emission = Emission(sequence, 0, replace_run(row, num_tokens), 0)
        promises.note([emission], now_s)
    promises.end(Ended(sequence, "length"), 1.0)
    counted = {name: PROMISES.labels(*name)._value.get() - before[name] for name in names}
    assert counted == {
        ("ttft", "kept"): ttft_ms == 110,
        ("ttft", "missed"): ttft_ms == 90,
        ("tpot", "kept"): tpot_ms == 11,
        ("tpot", "missed"): tpot_ms == 9,
    }
    assert not promises._times


def replace_run(row: ResultRow, num_tokens: int) -> ResultRow:
    return ResultRow(row.slot, row.request, row.attempt, TokenRun(num_tokens))

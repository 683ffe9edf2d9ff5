from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.bench.figures import figures
from cli.bench.row import Row
from cli.bench.stream import Stream, Usage
from cli.bench.verdict import objections, sentence, thirds_ms


def row(
    ttft_s: float = 0.1, e2e_s: float = 0.5, num_tokens: int = 5, error: str = "", at_s: float = 0.0
) -> Row:
    gaps_s = [0.1] * (num_tokens - 1)
    end_s = at_s + e2e_s
    return Row(at_s, at_s, end_s, error, num_tokens, 10, 0 if error else num_tokens, ttft_s, gaps_s)


times = st.floats(0.001, 100)
rows = st.lists(
    st.builds(row, times, times, st.integers(1, 9), st.sampled_from(["", "", "oops"]), times),
    min_size=1,
    max_size=30,
)


@given(rows)
def test_figures_agree_with_each_other(rows: list[Row]):
    found = figures(rows, {"ttft": 500.0}, True)
    whole = [each for each in rows if not each.error]
    assert found["num_requests"] == len(rows)
    assert found["num_failed"] == len(rows) - len(whole) == sum(found["errors"].values())
    assert found["output_tokens"] == sum(each.output_tokens for each in whole)
    assert found["input_tokens"] == 10 * len(whole)
    assert found["requests_per_s"] * found["duration_s"] == pytest.approx(len(whole))
    assert 0 <= found["goodput"]["share"] <= len(whole) / len(rows)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms", "late_ms"):
        if spread := found[name]:
            assert spread["p50"] <= spread["p90"] <= spread["p99"]
    if whole:
        assert found["e2e_ms"]["p99"] <= max(each.e2e_s for each in whole) * 1000 * (1 + 1e-9)
    else:
        assert found["ttft_ms"] is None


@given(rows, st.floats(1, 1e5), st.floats(1, 1e5))
def test_a_stricter_target_is_met_by_no_more(rows: list[Row], one: float, other: float):
    shares = [
        figures(rows, {"ttft": 1e6, "e2e": target}, False)["goodput"]["share"]
        for target in sorted((one, other))
    ]
    assert shares == sorted(shares)


def test_the_figures_of_a_run_that_was_reckoned_by_hand():
    ends = [row(0.1, 0.5, 5), row(0.3, 1.3, 11, at_s=1.0), row(error="429: too many", at_s=3.0)]
    found = figures(ends, {"ttft": 200, "tpot": 100}, True)
    assert found["duration_s"] == 3.5
    assert found["ttft_ms"]["mean"] == pytest.approx(200)
    assert found["tpot_ms"]["p50"] == pytest.approx(100)
    assert found["itl_ms"]["mean"] == pytest.approx(100)
    assert found["e2e_ms"]["p90"] == pytest.approx(500 + 0.9 * 800)
    assert found["output_tokens_per_s"] == pytest.approx(16 / 3.5)
    assert found["goodput"]["share"] == pytest.approx(1 / 3)
    assert found["errors"] == {"429: too many": 1}
    assert found["num_short"] == 0


def test_an_answer_of_one_token_has_no_tpot_and_meets_any():
    one = row(0.1, 0.1, 1)
    assert one.tpot_s is None
    assert one.meets({"tpot": 0.001})
    assert figures([one], {}, False)["tpot_ms"] is None


def test_without_a_schedule_no_request_is_late():
    assert figures([row()], {}, False)["late_ms"] is None


def test_an_answer_that_shows_no_text_has_its_end_as_first_token():
    stream = Stream()
    stream.usage = Usage(7, 2)
    each = Row.of(stream, 3, due_s=0.0, started_s=1.0, ended_s=5.0, error="")
    assert (each.ttft_s, each.e2e_s, each.tpot_s) == (4.0, 4.0, 0.0)
    assert figures([each], {}, False)["num_short"] == 1


def run(*ttfts_s: float, **others: Any) -> list[Row]:
    return [row(each, at_s=at_s, **others) for each, at_s in zip(ttfts_s, count(), strict=False)]


def judged(rows: list[Row], **targets: float) -> list[str]:
    return objections(rows, figures(rows, targets, True))


def test_a_server_whose_ttft_stays_keeps_up():
    rows = run(0.1, 0.1, 0.5, 0.5, 0.19, 0.19)
    assert thirds_ms(rows) == pytest.approx((100, 190))
    assert judged(rows, ttft=600) == []
    assert "keeps up with 2 requests/s: at 3/s for 60 s" in sentence(2, 3, 60, [])


def test_a_growing_queue_a_failure_and_missed_targets_are_each_an_objection():
    assert "queue grows: mean TTFT went from 100.0 to 210.0 ms" in judged(run(0.1, 0.15, 0.21))[0]
    assert judged([*run(0.1, 0.1, 0.1), row(error="x", at_s=9.0)]) == ["1 of 4 requests failed"]
    (missed,) = judged(run(*[0.1] * 98, 0.3, 0.3), ttft=200)
    assert missed.startswith("98.0% met")
    assert judged(run(*[0.1] * 99, 0.11), ttft=105) == []
    assert sentence(2, 3, 60, ["a", "b"]).startswith("does not keep up with 2 requests/s")
    assert sentence(2, 3, 60, ["a", "b"]).endswith("a; b")


def test_where_nothing_was_answered_the_failures_are_the_objection():
    assert judged(run(0.1, 0.1, error="x")) == ["2 of 2 requests failed"]

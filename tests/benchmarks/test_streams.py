"""The figures of ``benchmarks/streams.py``, of records with known times and of a server."""

from argparse import Namespace

import pytest

from benchmarks import servers
from benchmarks.harness.stream_clients import Record
from benchmarks.streams import Cell, figures_of, measure, promise_ms
from shared.model_folder import EMBEDDED_MODEL


def _stream(
    tokens_s: list[float], client: int = 0, sent_s: float = -1.0, is_over: bool = False
) -> Record:
    chunks = [(time_s, 1) for time_s in tokens_s]
    return Record(
        client=client, num_prompt_tokens=16, sent_s=sent_s, chunks=chunks, is_over=is_over
    )


def _cell(*streams: Record, prompts: list[Record] | None = None) -> Cell:
    return Cell(from_s=0.0, until_s=10.0, streams=list(streams), prompts=prompts or [])


def _steady(every_s: float, client: int = 0) -> Record:
    """Begins before the measurement and goes on after it."""
    return _stream([-0.5 + every_s * number for number in range(int(12 / every_s))], client)


ALONE = _cell(_steady(0.01))


def test_steady_streams_keep_the_promise_of_twice_their_own_time():
    figures = figures_of(ALONE, ALONE, promise_ms(ALONE))
    assert figures["promise, ms per token"] == pytest.approx(20)
    assert figures["tokens/s of a stream"] == pytest.approx(100, rel=0.01)
    assert figures["ratio to the streams alone"] == 1
    assert figures["ms between chunks, max"] == pytest.approx(10)
    assert figures["windows that keep it"] == 1


def test_the_stream_in_the_middle_counts():
    cell = _cell(*(_steady(every_s, number) for number, every_s in enumerate((0.01, 0.02, 0.04))))
    figures = figures_of(cell, ALONE, 25.0)
    assert figures["tokens/s of a stream"] == pytest.approx(50, rel=0.01)
    assert figures["ratio to the streams alone"] == pytest.approx(0.5, rel=0.02)


def test_windows_count_tokens_of_chunks_with_several():
    chunks = [(0.1 * number, 8) for number in range(80)]
    record = Record(client=0, num_prompt_tokens=16, sent_s=-1.0, chunks=chunks, is_over=True)
    whole_ms, cut_ms = _cell(record).windows_ms()
    assert whole_ms == pytest.approx([200 / 16] * 39)
    assert cut_ms == []


def test_a_stream_that_stalls_until_the_end_is_no_stream_without_gaps():
    cell = _cell(_stream([-1.0, -0.5, 1.0]))
    assert max(cell.gaps_ms()) == pytest.approx(9000)
    assert cell.rates() == [pytest.approx(0.1)]
    figures = figures_of(cell, ALONE, 20.0)
    assert figures["windows that keep it"] == 0


def test_time_to_the_first_token_is_not_time_between_tokens():
    """Two requests of one stream: the second waits three seconds."""
    cell = _cell(
        _stream([0.0, 1.0, 2.0], is_over=True), _stream([5.0, 6.0, 7.0], sent_s=2.0, is_over=True)
    )
    assert cell.rates() == [pytest.approx(1.0)]
    assert max(cell.gaps_ms()) == pytest.approx(1000)
    assert cell.first_tokens_ms(cell.streams) == pytest.approx([1000, 3000])


def test_prompts_count_if_their_answers_are_within_the_time():
    prompts = [
        Record(client=0, num_prompt_tokens=num, sent_s=end_s - 2, chunks=[(end_s, 1)], is_over=True)
        for num, end_s in ((1000, -0.5), (2000, 4.0), (3000, 9.0), (4000, 10.5))
    ]
    cell = _cell(_steady(0.01), prompts=prompts)
    assert cell.prompt_rate() == 500
    figures = figures_of(cell, ALONE, 20.0)
    assert figures["ms to the first token of a prompt, p50"] == pytest.approx(2000)


def test_without_answers_the_waits_count():
    waiting = Record(client=0, num_prompt_tokens=100, sent_s=4.0)
    cell = _cell(_steady(0.01), prompts=[waiting])
    assert cell.prompt_rate() == 0
    assert cell.first_tokens_ms(cell.prompts) == [6000]


@pytest.mark.slow
async def test_a_server_beside_prompts():
    arguments = Namespace(
        model=EMBEDDED_MODEL, speculation=False, streams=[2], neighbours=[1], rounds=1
    )
    arguments.prompt_tokens, arguments.tpot_ms, arguments.seconds = 200, 1000.0, 2.0
    found = await measure({"ours": servers.ROOT}, arguments)
    alone, beside = (each["ours"] for each in found.values())
    assert alone["windows that keep it"]["median"] == 1
    assert all(each["tokens/s of a stream"]["median"] > 0 for each in (alone, beside))
    assert beside["prompt tokens/s"]["median"] > 0

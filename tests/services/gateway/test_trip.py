"""One prompt over several attempts: what is submitted anew, and what its client may get more."""

import numpy as np
import pytest

from services.gateway.exchange import Exchange, Progress
from services.gateway.job import Job, Prompt
from services.gateway.trip import MAX_REPLAYS, SAME_HANG_S, Trip
from shared.errors import InternalError
from shared.messages import (
    WINDOW_BYTES,
    WINDOW_TOKENS,
    ChoiceStart,
    Delta,
    Finished,
    SamplingParams,
    TextOptions,
)
from shared.token_arrays import TokenArrays

PROMPT = Prompt("text", np.frombuffer(b"Once", np.uint8))
IDS = np.array([7, 8, 9], np.int32)


def new_trip(num_choices: int = 1) -> tuple[Trip, Exchange]:
    job = Job(
        model="m",
        prompts=[PROMPT],
        num_choices=num_choices,
        params=SamplingParams(seed=1),
        text=TextOptions(),
        priority=3,
        is_stream=False,
        includes_usage=False,
    )
    exchange = Exchange(1, num_choices)
    return Trip("a~b/0", 0, job, exchange), exchange


def add(
    trip: Trip, position: int, text: str, ids: list[int], num_values: int = 0, choice=0
) -> None:
    row = Delta(trip.request, trip.attempt, choice, position, len(ids), text, num_values)
    values = np.zeros(num_values * len(ids), np.float32)
    ranks = np.ones(len(ids) if num_values else 0, np.int32)
    trip.add(row, TokenArrays(np.array(ids, np.int32), values, IDS[:0], ranks))


async def take(trip: Trip, exchange: Exchange):
    return trip.take(await anext(exchange))


def test_a_replay_asks_for_what_is_missing_of_the_choices_that_have_not_ended():
    trip, _ = new_trip(num_choices=3)
    trip.accept(IDS)
    add(trip, 0, "ab", [1, 2])
    add(trip, 0, "xyz", [3], choice=2)
    trip.finish(Finished("a~b/0", 1, 2, "stop", 1))
    trip.begin_replay(0)
    submit, prompt, resumed = trip.submit()
    assert (submit.attempt, submit.kind, submit.priority) == (2, "ids", 3)
    assert submit.choices == [ChoiceStart(0, 2, 2), ChoiceStart(1, 0, 0)]
    assert prompt.tolist() == IDS.tolist()
    assert resumed.tolist() == [1, 2]


def test_before_it_was_accepted_a_replay_is_the_first_submit_again():
    trip, _ = new_trip()
    trip.begin_replay(0)
    submit, prompt, _ = trip.submit()
    assert submit.kind == "text"
    assert prompt.tobytes() == b"Once"


def test_there_are_so_many_replays_and_no_more():
    trip, _ = new_trip()
    for _ in range(MAX_REPLAYS):
        trip.begin_replay(0)
    with pytest.raises(InternalError, match="3 services died"):
        trip.begin_replay(0)


def test_progress_forgets_the_losses_before_it():
    trip, _ = new_trip()
    for position in range(2 * MAX_REPLAYS):
        trip.begin_replay(0)
        add(trip, position, "a", [1])
    for _ in range(MAX_REPLAYS):
        trip.begin_replay(0)
        add(trip, 2 * MAX_REPLAYS, "held back", [])
    with pytest.raises(InternalError):
        trip.begin_replay(0)


def test_a_scheduler_that_tokenizer_after_tokenizer_loses_is_one_loss():
    trip, exchange = new_trip()
    for now_s in (100.0, 100.3, 103.0, 106.0):
        trip.begin_replay(now_s, scheduler="s1")
    assert (trip.num_losses, exchange.num_replays) == (1, 4)
    trip.begin_replay(107.0)
    trip.begin_replay(108.0, scheduler="s1")
    assert trip.num_losses == 2, "the tokenizer is one more, the scheduler is not"
    with pytest.raises(InternalError, match="3 services died"):
        trip.begin_replay(109.0, scheduler="s2")


def test_a_scheduler_that_is_lost_again_much_later_is_another_loss():
    trip, _ = new_trip()
    for number in range(MAX_REPLAYS):
        trip.begin_replay(100.0 + number * SAME_HANG_S, scheduler="s1")
    with pytest.raises(InternalError, match="3 services died"):
        trip.begin_replay(100.0 + MAX_REPLAYS * SAME_HANG_S, scheduler="s1")


def test_a_service_that_leaves_on_purpose_is_no_loss():
    trip, exchange = new_trip()
    for _ in range(2 * MAX_REPLAYS):
        trip.begin_replay(0, is_planned=True)
    assert (trip.num_losses, exchange.num_replays) == (0, 2 * MAX_REPLAYS)


async def test_a_choice_had_of_the_cache_what_its_first_attempt_found():
    trip, exchange = new_trip(num_choices=2)
    for attempt, num_cached in enumerate([3, 85], 1):
        row = Delta(trip.request, attempt, 0, attempt - 1, 1, "a", num_cached=num_cached)
        trip.add(row, TokenArrays(IDS[:1]))
        trip.begin_replay(0)
    for choice in range(2):
        trip.finish(Finished(trip.request, trip.attempt, choice, "stop", 2, num_cached=84))
    found = {each.index: each.finished.num_cached async for each in exchange}
    assert found == {0: 3, 1: 84}, "of the second nothing had come"


def test_tokens_that_do_not_follow_the_last_ones_are_an_error():
    trip, _ = new_trip()
    add(trip, 0, "a", [1])
    with pytest.raises(InternalError):
        add(trip, 0, "a", [1])
    with pytest.raises(InternalError):
        add(trip, 2, "a", [1])


async def test_credit_is_granted_when_half_a_window_of_tokens_was_taken():
    trip, exchange = new_trip()
    half = WINDOW_TOKENS // 2
    add(trip, 0, "a", [1] * (half - 1))
    assert await take(trip, exchange) is None
    add(trip, half - 1, "a", [1])
    grant = await take(trip, exchange)
    assert grant.request == "a~b/0/0"
    assert grant.num_tokens == half + WINDOW_TOKENS


async def test_credit_is_granted_when_half_a_window_of_bytes_was_taken():
    trip, exchange = new_trip()
    num_values = WINDOW_BYTES // 8
    add(trip, 0, "a", [1], num_values)
    grant = await take(trip, exchange)
    assert grant.num_bytes == 4 * (1 + num_values + 1) + WINDOW_BYTES


async def test_after_a_replay_bytes_are_counted_anew_and_what_nobody_read_still_counts():
    trip, exchange = new_trip()
    num_values = WINDOW_BYTES // 8
    add(trip, 0, "a", [1], num_values)
    trip.begin_replay(0)
    add(trip, 1, "b", [1], num_values)
    grant = await take(trip, exchange)
    assert grant.attempt == 2
    assert grant.num_bytes == 4 * (1 + num_values + 1) + WINDOW_BYTES


async def test_an_abort_ends_each_open_choice_with_what_it_has():
    trip, exchange = new_trip(num_choices=2)
    add(trip, 0, "a", [1])
    trip.finish(Finished("a~b/0", 1, 1, "stop", 0))
    trip.abort()
    seen: list[Progress] = [progress async for progress in exchange]
    reasons = {progress.index: progress.finished.reason for progress in seen}
    assert reasons == {0: "abort", 1: "stop"}
    assert trip.choices == {}


def send_heartbeat(trip: Trip, position: int, ids: list[int], num_values: int = 1) -> None:
    """Of the prompt."""
    row = Delta(trip.request, trip.attempt, 0, position, len(ids), "", num_values, 0, True)
    values, ranks = np.zeros(num_values * len(ids), np.float32), np.ones(len(ids), np.int32)
    trip.add(row, TokenArrays(np.array(ids, np.int32), values, IDS[:0], ranks))


def test_a_replay_tells_how_much_of_the_prompt_is_told():
    trip, _ = new_trip(num_choices=2)
    trip.accept(IDS)
    send_heartbeat(trip, 0, [8])
    trip.begin_replay(0)
    submit, _, resumed = trip.submit()
    assert submit.choices == [ChoiceStart(0, 0, 0, 1), ChoiceStart(1)]
    assert resumed.tolist() == []
    with pytest.raises(InternalError, match="token 0 of the prompt of choice 0"):
        send_heartbeat(trip, 0, [8])
    send_heartbeat(trip, 1, [9])
    add(trip, 0, "a", [1])


async def test_what_is_told_of_a_prompt_counts_in_bytes_and_not_in_tokens():
    trip, exchange = new_trip()
    half = WINDOW_TOKENS // 2
    send_heartbeat(trip, 0, [8] * half)
    assert await take(trip, exchange) is None
    num_values = WINDOW_BYTES // 8
    send_heartbeat(trip, half, [8], num_values)
    grant = await take(trip, exchange)
    assert grant.num_bytes == 12 * half + 4 * (1 + num_values + 1) + WINDOW_BYTES
    assert grant.num_tokens == WINDOW_TOKENS


def draft(trip: Trip, position: int, num: int) -> None:
    row = Delta(trip.request, trip.attempt, 0, position, num, "", 1, of_drafts=True)
    numbers = np.arange(num, dtype=np.int32)
    trip.add(row, TokenArrays(numbers, np.zeros(num, np.float32), IDS[:0], numbers))


async def test_drafts_count_in_bytes_and_are_no_tokens():
    trip, exchange = new_trip()
    draft(trip, 0, 5)
    add(trip, 0, "a", [1])
    assert await take(trip, exchange) is None
    num = WINDOW_BYTES // 24
    draft(trip, 1, num)
    add(trip, 1, "b", [2])
    grant = await take(trip, exchange)
    assert grant.num_bytes == 4 + 4 + 12 * (5 + num) + WINDOW_BYTES
    assert grant.num_tokens == WINDOW_TOKENS + 2
    trip.begin_replay(0)
    submit, _, resumed = trip.submit()
    assert submit.choices == [ChoiceStart(0, 2, 2)]
    assert resumed.tolist() == [1, 2]


def test_drafts_for_other_tokens_than_the_next_ones_are_an_error():
    trip, _ = new_trip()
    add(trip, 0, "a", [1])
    with pytest.raises(InternalError, match="token 0 of choice 0 came where 1 belongs"):
        draft(trip, 0, 2)

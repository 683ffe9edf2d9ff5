"""One prompt over several attempts: its resubmission, and the client's further tokens."""

from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

from services.gateway.mesh.job import Attachment, Job, Prompt
from services.gateway.mesh.losses import MAX_REPLAYS, MAX_SPARED, SAME_HANG_S
from services.gateway.mesh.open_prompt import OpenPrompt
from services.gateway.mesh.output_collector import ChoiceUpdate, OutputCollector
from shared.errors import CodecError, InternalError
from shared.wire.envelope import RequestOptions, read_options
from shared.wire.messages import (
    WINDOW_BYTES,
    WINDOW_TOKENS,
    ChatOptions,
    ChoiceStart,
    Delta,
    Finished,
    Mark,
    Medium,
    OutputFormat,
    OutputStart,
    RunKind,
    SamplingParams,
    TextOptions,
    TokenRun,
    ToolChoice,
)
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.asking import chat

PROMPT = Prompt("text", np.frombuffer(b"Once", np.uint8))
IDS = np.array([7, 8, 9], np.int32)
FILES = [Attachment(Medium(param=f"messages[{n}]"), np.full(n, n, np.uint8)) for n in range(4)]


def new_open_prompt(
    num_choices: int = 1, prompt: Prompt = PROMPT
) -> tuple[OpenPrompt, OutputCollector]:
    job = Job(
        model="m",
        prompts=[prompt],
        num_choices=num_choices,
        params=SamplingParams(seed=1),
        text=TextOptions(),
        options=RequestOptions(priority=3),
        is_stream=False,
        includes_usage=False,
    )
    collector = OutputCollector(1, num_choices)
    return OpenPrompt("a~b/0", 0, job, collector), collector


def add(
    open_prompt: OpenPrompt, position: int, text: str, ids: list[int], num_values: int = 0, choice=0
) -> None:
    row = Delta(
        open_prompt.request,
        open_prompt.attempt,
        choice,
        position,
        TokenRun(len(ids), num_values),
        text,
    )
    values = np.zeros(num_values * len(ids), np.float32)
    ranks = np.ones(len(ids) if num_values else 0, np.int32)
    open_prompt.add(row, TokenArrays(np.array(ids, np.int32), values, IDS[:0], ranks))


async def take(open_prompt: OpenPrompt, collector: OutputCollector):
    return open_prompt.take(await anext(collector))


def test_a_replay_asks_for_the_rest_of_open_choices():
    open_prompt, _ = new_open_prompt(num_choices=3)
    open_prompt.accept(IDS)
    add(open_prompt, 0, "ab", [1, 2])
    add(open_prompt, 0, "xyz", [3], choice=2)
    open_prompt.finish(Finished("a~b/0", 1, 2, "stop", 1))
    open_prompt.begin_replay(0)
    submit, (prompt, resumed) = open_prompt.submit()
    assert (submit.attempt, submit.kind) == (2, "ids")
    assert read_options(submit.options).priority == 3
    assert submit.choices == [ChoiceStart(0, 2, 2), ChoiceStart(1, 0, 0)]
    assert prompt.tolist() == IDS.tolist()
    assert resumed.tolist() == [1, 2]


def test_before_it_was_accepted_a_replay_is_the_first_submit_again():
    open_prompt, _ = new_open_prompt()
    open_prompt.begin_replay(0)
    submit, (prompt, _) = open_prompt.submit()
    assert submit.kind == "text"
    assert prompt.tobytes() == b"Once"


def test_a_pair_is_submitted_again_as_two_texts():
    """Its ids alone lack the types of the second text."""
    data = np.frombuffer(b'["who", "me"]', np.uint8)
    open_prompt, _ = new_open_prompt(prompt=Prompt("pair", data))
    open_prompt.accept(IDS)
    open_prompt.begin_replay(0)
    submit, (prompt, _) = open_prompt.submit()
    assert submit.kind == "pair"
    assert prompt.tobytes() == data.tobytes()


def test_there_are_so_many_replays_and_no_more():
    open_prompt, _ = new_open_prompt()
    for _ in range(MAX_REPLAYS):
        open_prompt.begin_replay(0)
    with pytest.raises(InternalError, match="3 services died"):
        open_prompt.begin_replay(0)


def test_progress_forgets_the_losses_before_it():
    open_prompt, _ = new_open_prompt()
    for position in range(2 * MAX_REPLAYS):
        open_prompt.begin_replay(0)
        add(open_prompt, position, "a", [1])
    for _ in range(MAX_REPLAYS):
        open_prompt.begin_replay(0)
        add(open_prompt, 2 * MAX_REPLAYS, "held back", [])
    with pytest.raises(InternalError):
        open_prompt.begin_replay(0)


def test_a_scheduler_that_tokenizer_after_tokenizer_loses_is_one_loss():
    open_prompt, collector = new_open_prompt()
    for now_s in (100.0, 100.3, 103.0, 106.0):
        open_prompt.begin_replay(now_s, scheduler="s1")
    assert (open_prompt.losses.num_charged, collector.num_replays) == (1, 4)
    open_prompt.begin_replay(107.0)
    open_prompt.begin_replay(108.0, scheduler="s1")
    assert open_prompt.losses.num_charged == 2, "the tokenizer is one more, the scheduler is not"
    with pytest.raises(InternalError, match="3 services died"):
        open_prompt.begin_replay(109.0, scheduler="s2")


def test_a_prompt_that_a_tokenizer_had_accepted_is_not_charged_with_its_loss():
    open_prompt, collector = new_open_prompt()
    for _ in range(MAX_REPLAYS):
        open_prompt.begin_replay(0)
    for _ in range(MAX_SPARED):
        open_prompt.accept(IDS)
        open_prompt.begin_replay(0)
    assert open_prompt.losses.num_charged == MAX_REPLAYS
    assert collector.num_replays == MAX_REPLAYS + MAX_SPARED
    open_prompt.accept(IDS)
    with pytest.raises(InternalError, match="9 services were lost"):
        open_prompt.begin_replay(0)


def test_a_service_that_lives_after_all_is_no_loss_but_has_a_bound():
    open_prompt, _ = new_open_prompt()
    for number in range(MAX_SPARED):
        open_prompt.begin_replay(100.0 * number, scheduler=f"s{number}")
        open_prompt.losses.forgive(f"scheduler s{number}")
        open_prompt.losses.forgive("scheduler another")
    assert open_prompt.losses.num_charged == 0
    open_prompt.accept(IDS)
    with pytest.raises(InternalError, match="9 services were lost"):
        open_prompt.begin_replay(0)
    add(open_prompt, 0, "a", [1])
    open_prompt.begin_replay(0)


def test_a_scheduler_that_is_lost_again_much_later_is_another_loss():
    open_prompt, _ = new_open_prompt()
    for number in range(MAX_REPLAYS):
        open_prompt.begin_replay(100.0 + number * SAME_HANG_S, scheduler="s1")
    with pytest.raises(InternalError, match="3 services died"):
        open_prompt.begin_replay(100.0 + MAX_REPLAYS * SAME_HANG_S, scheduler="s1")


def test_a_service_that_leaves_on_purpose_is_no_loss():
    open_prompt, collector = new_open_prompt()
    for _ in range(2 * MAX_REPLAYS):
        open_prompt.begin_replay(0, is_explained=True)
    assert (open_prompt.losses.num_charged, collector.num_replays) == (0, 2 * MAX_REPLAYS)


async def test_a_choice_reports_the_cached_tokens_of_its_first_attempt():
    open_prompt, collector = new_open_prompt(num_choices=2)
    for attempt, num_cached in enumerate([3, 85], 1):
        row = Delta(open_prompt.request, attempt, 0, attempt - 1, TokenRun(1), "a", num_cached)
        open_prompt.add(row, TokenArrays(IDS[:1]))
        open_prompt.begin_replay(0)
    for choice in range(2):
        open_prompt.finish(
            Finished(open_prompt.request, open_prompt.attempt, choice, "stop", 2, num_cached=84)
        )
    found = {each.index: each.finished.num_cached async for each in collector}
    assert found == {0: 3, 1: 84}, "of the second nothing had come"


def test_tokens_that_do_not_follow_the_last_ones_are_an_error():
    open_prompt, _ = new_open_prompt()
    add(open_prompt, 0, "a", [1])
    with pytest.raises(InternalError):
        add(open_prompt, 0, "a", [1])
    with pytest.raises(InternalError):
        add(open_prompt, 2, "a", [1])


async def test_credit_is_granted_when_half_a_window_of_tokens_was_taken():
    open_prompt, collector = new_open_prompt()
    half = WINDOW_TOKENS // 2
    add(open_prompt, 0, "a", [1] * (half - 1))
    assert await take(open_prompt, collector) is None
    add(open_prompt, half - 1, "a", [1])
    grant = await take(open_prompt, collector)
    assert grant.request == "a~b/0/0"
    assert grant.num_tokens == half + WINDOW_TOKENS


async def test_credit_is_granted_when_half_a_window_of_bytes_was_taken():
    open_prompt, collector = new_open_prompt()
    num_values = WINDOW_BYTES // 8
    add(open_prompt, 0, "a", [1], num_values)
    grant = await take(open_prompt, collector)
    assert grant.num_bytes == 4 * (1 + num_values + 1) + WINDOW_BYTES


async def test_after_a_replay_bytes_are_counted_anew_and_unread_ones_still_count():
    open_prompt, collector = new_open_prompt()
    num_values = WINDOW_BYTES // 8
    add(open_prompt, 0, "a", [1], num_values)
    open_prompt.begin_replay(0)
    add(open_prompt, 1, "b", [1], num_values)
    grant = await take(open_prompt, collector)
    assert grant.attempt == 2
    assert grant.num_bytes == 4 * (1 + num_values + 1) + WINDOW_BYTES


async def test_an_abort_ends_each_open_choice_with_its_partial_text():
    open_prompt, collector = new_open_prompt(num_choices=2)
    add(open_prompt, 0, "a", [1])
    open_prompt.finish(Finished("a~b/0", 1, 1, "stop", 0))
    open_prompt.abort()
    seen: list[ChoiceUpdate] = [update async for update in collector]
    reasons = {update.index: update.finished.reason for update in seen}
    assert reasons == {0: "abort", 1: "stop"}
    assert open_prompt.choices == {}


async def test_a_cut_ends_a_choice_once_and_not_one_that_has_ended():
    open_prompt, collector = new_open_prompt(num_choices=2)
    open_prompt.finish(Finished("a~b/0", 1, 1, "stop", 0))
    assert not open_prompt.cut(1)
    assert not open_prompt.has_cut
    assert open_prompt.cut(0)
    assert not open_prompt.cut(0)
    assert [update.index async for update in collector] == [1, 0]


def add_prompt_logprobs(
    open_prompt: OpenPrompt, position: int, ids: list[int], num_values: int = 1
) -> None:
    row = Delta(
        open_prompt.request,
        open_prompt.attempt,
        0,
        position,
        TokenRun(len(ids), num_values, 0, kind=RunKind.PROMPT),
    )
    values, ranks = np.zeros(num_values * len(ids), np.float32), np.ones(len(ids), np.int32)
    open_prompt.add(row, TokenArrays(np.array(ids, np.int32), values, IDS[:0], ranks))


def test_a_replay_submits_how_much_of_the_prompt_is_scored():
    open_prompt, _ = new_open_prompt(num_choices=2)
    open_prompt.accept(IDS)
    add_prompt_logprobs(open_prompt, 0, [8])
    open_prompt.begin_replay(0)
    submit, (_, resumed) = open_prompt.submit()
    assert submit.choices == [ChoiceStart(0, 0, 0, 1), ChoiceStart(1)]
    assert resumed.tolist() == []
    with pytest.raises(InternalError, match="token 0 of the prompt of choice 0"):
        add_prompt_logprobs(open_prompt, 0, [8])
    add_prompt_logprobs(open_prompt, 1, [9])
    add(open_prompt, 0, "a", [1])


async def test_prompt_logprobs_count_in_bytes_and_not_in_tokens():
    open_prompt, collector = new_open_prompt()
    half = WINDOW_TOKENS // 2
    add_prompt_logprobs(open_prompt, 0, [8] * half)
    assert await take(open_prompt, collector) is None
    num_values = WINDOW_BYTES // 8
    add_prompt_logprobs(open_prompt, half, [8], num_values)
    grant = await take(open_prompt, collector)
    assert grant.num_bytes == 12 * half + 4 * (1 + num_values + 1) + WINDOW_BYTES
    assert grant.num_tokens == WINDOW_TOKENS


def draft(open_prompt: OpenPrompt, position: int, num: int) -> None:
    row = Delta(
        open_prompt.request, open_prompt.attempt, 0, position, TokenRun(num, 1, kind=RunKind.DRAFTS)
    )
    numbers = np.arange(num, dtype=np.int32)
    open_prompt.add(row, TokenArrays(numbers, np.zeros(num, np.float32), IDS[:0], numbers))


async def test_drafts_count_in_bytes_and_are_no_tokens():
    open_prompt, collector = new_open_prompt()
    draft(open_prompt, 0, 5)
    add(open_prompt, 0, "a", [1])
    assert await take(open_prompt, collector) is None
    num = WINDOW_BYTES // 24
    draft(open_prompt, 1, num)
    add(open_prompt, 1, "b", [2])
    grant = await take(open_prompt, collector)
    assert grant.num_bytes == 4 + 4 + 12 * (5 + num) + WINDOW_BYTES
    assert grant.num_tokens == WINDOW_TOKENS + 2
    open_prompt.begin_replay(0)
    submit, (_, resumed) = open_prompt.submit()
    assert submit.choices == [ChoiceStart(0, 2, 2)]
    assert resumed.tolist() == [1, 2]


def test_drafts_for_other_tokens_than_the_next_ones_are_an_error():
    open_prompt, _ = new_open_prompt()
    add(open_prompt, 0, "a", [1])
    with pytest.raises(InternalError, match="token 0 of choice 0 came where 1 belongs"):
        draft(open_prompt, 0, 2)


def test_all_that_a_job_wants_of_its_text_is_submitted_and_again_with_a_replay() -> None:
    asked = chat(guided_regex="a", thinking_token_budget=5, documents=[{"text": "d"}])
    text = structs.replace(asked.text, has_marks=True)
    job = replace(asked, text=text, tool_choice=ToolChoice("auto"))
    collector = OutputCollector(1, 1)
    open_prompt = OpenPrompt("a~b/0", 0, job, collector)
    open_prompt.accept(IDS, OutputStart.UNDECIDED)
    assert collector.starts == [OutputStart.UNDECIDED]
    marks = [Mark(0, 1, 0, 7), Mark(1, 1, 0, 7)]
    row = Delta("a~b/0", 1, 0, 0, TokenRun(1), "ab", marks=marks)
    open_prompt.add(row, TokenArrays(IDS[:1]))
    for attempt, marks_before in ((1, 2), (2, 2)):
        submit, _ = open_prompt.submit()
        assert (submit.attempt, submit.choices[0].num_marks) == (attempt, marks_before)
        assert submit.text.has_marks
        assert (submit.chat, submit.format, submit.tool_choice, submit.reasoning_budget) == (
            ChatOptions(documents='[{"text": "d"}]'),
            OutputFormat("regex", "guided_regex", "a"),
            ToolChoice("auto"),
            5,
        )
        open_prompt.begin_replay(0)


def sent_files(open_prompt: OpenPrompt) -> list[tuple[Medium, list[int]]]:
    submit, (_, _, *files) = open_prompt.submit()
    assert submit.media_options == '{"max_pixels":784}'
    return [(each, file.tolist()) for each, file in zip(submit.media, files, strict=True)]


def test_a_replay_has_the_files_that_the_ids_stand_for_in_their_order() -> None:
    prompt = Prompt("chat", PROMPT.data, FILES, '{"max_pixels":784}')
    open_prompt, _ = new_open_prompt(prompt=prompt)
    assert sent_files(open_prompt) == [(each.medium, each.data.tolist()) for each in FILES]
    open_prompt.accept(IDS, media=[3, 1])
    open_prompt.begin_replay(0)
    assert open_prompt.submit()[0].kind == "ids"
    kept = [(FILES[n].medium, [n] * n) for n in (3, 1)]
    assert sent_files(open_prompt) == kept
    open_prompt.accept(IDS, media=[0, 1])
    assert sent_files(open_prompt) == kept, "numbers of the last attempt"
    open_prompt.begin_replay(0)
    open_prompt.accept(IDS)
    assert sent_files(open_prompt) == []


def test_a_number_that_no_file_has_is_refused() -> None:
    open_prompt, _ = new_open_prompt(prompt=Prompt("chat", PROMPT.data, FILES))
    with pytest.raises(CodecError, match="medium 4 of a prompt with 4"):
        open_prompt.accept(IDS, media=[0, 4])
    assert not open_prompt.is_accepted
    open_prompt.accept(IDS, media=[0])
    with pytest.raises(CodecError, match="medium 1 of a prompt with 1"):
        open_prompt.accept(IDS, media=[1])

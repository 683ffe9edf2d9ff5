"""One request's mailbox, without a mesh."""

import asyncio

import numpy as np
import pytest

from services.gateway.mesh.output_collector import OutputCollector, merged
from shared.errors import Unavailable
from shared.wire.messages import Delta, Finished, Mark, OutputStart, RunKind, TokenRun
from shared.wire.token_arrays import TokenArrays


def add(collector: OutputCollector, index: int, position: int, text: str, *ids: int) -> None:
    row = Delta("a~b/0", 1, index, position, TokenRun(len(ids)), text)
    collector.add(index, row, TokenArrays(np.array(ids, np.int32)))


async def test_updates_during_the_readers_absence_are_merged() -> None:
    collector = OutputCollector(1, 1)
    for position, text in enumerate("abc"):
        add(collector, 0, position, text, position)
    update = await anext(collector)
    assert (update.text, update.arrays.ids.tolist(), update.finished) == ("abc", [0, 1, 2], None)
    add(collector, 0, 3, "d", 3, 4)
    finished = Finished("a~b/0", 1, 0, "stop", 5)
    collector.finish(0, finished)
    [last] = [update async for update in collector]
    assert (last.text, last.num_tokens, last.finished) == ("d", 2, finished)


async def test_each_choice_has_its_own_progress_and_the_last_end_is_the_end() -> None:
    collector = OutputCollector(1, 2)
    add(collector, 1, 0, "b", 1)
    add(collector, 0, 0, "a", 2)
    collector.finish(1, Finished("a~b/0", 1, 1, "stop", 1))
    first, second = await anext(collector), await anext(collector)
    assert [(each.index, each.text) for each in (first, second)] == [(1, "b"), (0, "a")]
    collector.finish(0, Finished("a~b/0", 1, 0, "length", 1))
    assert [update.index async for update in collector] == [0]


async def test_pending_text_is_read_before_the_error_is_raised() -> None:
    collector = OutputCollector(1, 1)
    add(collector, 0, 0, "a", 1)
    collector.fail(Unavailable("gone"), 0)
    assert (await anext(collector)).text == "a"
    with pytest.raises(Unavailable, match="gone"):
        await anext(collector)


async def test_a_reader_that_waits_is_woken_by_an_error() -> None:
    collector = OutputCollector(1, 1)
    reading = asyncio.ensure_future(anext(collector))
    await asyncio.sleep(0)
    collector.fail(Unavailable("gone"), 0)
    with pytest.raises(Unavailable):
        await reading


async def test_a_token_without_text_is_progress() -> None:
    collector = OutputCollector(1, 1)
    add(collector, 0, 0, "", 7)
    update = await anext(collector)
    assert (update.text, update.num_tokens) == ("", 1)


async def test_a_refused_request_is_not_accepted() -> None:
    collector = OutputCollector(2, 1)
    collector.accept(0, np.array([1, 2], np.int32))
    collector.fail(Unavailable("full"), 1)
    with pytest.raises(Unavailable):
        await collector.accepted()
    assert collector.failed_prompt == 1


async def test_prompt_tokens_count_once_for_each_prompt() -> None:
    collector = OutputCollector(2, 3)
    collector.accept(1, np.array([1, 2], np.int32))
    collector.accept(0, np.array([3], np.int32))
    await collector.accepted()
    assert collector.num_prompt_tokens == 3


def add_prompt_logprobs(collector: OutputCollector, index: int, position: int, *ids: int) -> None:
    row = Delta("a~b/0", 1, index, position, TokenRun(len(ids), kind=RunKind.PROMPT))
    collector.add(index, row, TokenArrays(np.array(ids, np.int32)))


async def test_a_text_waits_until_all_of_its_prompt_is_scored() -> None:
    collector = OutputCollector(2, 2, has_prompt_logprobs=True)
    for prompt in range(2):
        collector.accept(prompt, np.array([1, 2, 3], np.int32))
    add(collector, 1, 0, "b", 9)
    add(collector, 3, 0, "d", 9)
    add_prompt_logprobs(collector, 0, 0, 2)
    first = await anext(collector)
    assert (first.of_prompt, first.index, first.arrays.ids.tolist()) == (True, 0, [2])
    waiting = asyncio.ensure_future(anext(collector))
    await asyncio.sleep(0)
    assert not waiting.done()
    add_prompt_logprobs(collector, 2, 0, 2, 3)
    second = await waiting
    assert (second.of_prompt, second.index, second.arrays.ids.tolist()) == (True, 2, [2, 3])
    assert (await anext(collector)).index == 3
    add_prompt_logprobs(collector, 0, 1, 3)
    assert (await anext(collector)).of_prompt
    assert (await anext(collector)).index == 1


async def test_a_text_waits_neither_for_a_prompt_of_one_token_nor_for_an_aborted_one() -> None:
    collector = OutputCollector(2, 2, has_prompt_logprobs=True)
    collector.accept(0, np.array([1], np.int32))
    add(collector, 1, 0, "b", 9)
    assert (await anext(collector)).index == 1
    collector.accept(1, np.array([1, 2, 3], np.int32))
    add(collector, 3, 0, "d", 9)
    collector.finish(2, Finished("a~b/1", 1, 0, "abort", 0))
    assert {(await anext(collector)).index, (await anext(collector)).index} == {2, 3}


def verify(collector: OutputCollector, position: int, drafts: list[int], num_accepted: int) -> None:
    """One token more than accepted drafts, with the drafts."""
    name = ("a~b/0", 1, 0, position)
    numbers = np.array(drafts, np.int32)
    values = numbers.astype(np.float32)
    collector.add(
        0,
        Delta(*name, TokenRun(len(drafts), 1, kind=RunKind.DRAFTS, num_accepted=num_accepted)),
        TokenArrays(numbers, values, numbers[:0], numbers),
    )
    num = num_accepted + 1
    row = Delta(*name, TokenRun(num, num_drafts=len(drafts), num_accepted=num_accepted), "x")
    collector.add(0, row, TokenArrays(np.arange(num, dtype=np.int32)))


async def test_drafts_of_several_steps_are_one_beside_their_tokens() -> None:
    collector = OutputCollector(1, 1)
    verify(collector, 0, [7, 8, 9], 2)
    verify(collector, 3, [5], 0)
    update = await anext(collector)
    assert update.arrays.ids.tolist() == [0, 1, 2, 0]
    assert (update.run.num_values, update.run.num_drafts, update.run.num_accepted) == (0, 4, 2)
    assert update.drafts.arrays.ids.tolist() == [7, 8, 9, 5]
    assert update.drafts.positions.tolist() == [0, 1, 2, 3]
    assert update.drafts.are_accepted.tolist() == [True, True, False, False]
    verify(collector, 4, [6], 1)
    both = merged([update, await anext(collector)])
    assert both.drafts.positions.tolist() == [0, 1, 2, 3, 4]
    assert (both.run.num_tokens, both.run.num_drafts, both.run.num_accepted) == (6, 5, 3)


async def test_marks_of_several_deltas_are_in_one_update() -> None:
    collector = OutputCollector(1, 1)
    marks = [Mark(0, 1, 0, 7), Mark(2, 0, 2, 8), Mark(2, 1, 3, 9)]
    for some, text in ((marks[:1], "a"), ([], "b"), (marks[1:], "c")):
        row = Delta("a~b/0", 1, 0, 0, TokenRun(0), text, marks=some)
        collector.add(0, row, TokenArrays())
    update = await anext(collector)
    assert (update.text, update.marks) == ("abc", marks)


async def test_the_first_acceptance_decides_the_opened_part() -> None:
    collector, ids = OutputCollector(2, 1), np.array([1], np.int32)
    collector.accept(0, ids)
    collector.accept(1, ids, OutputStart.REASONING)
    collector.accept(1, ids)
    assert collector.starts == [OutputStart.ANSWER, OutputStart.REASONING]

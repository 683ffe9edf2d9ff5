"""Counts of a choice that ends after its only call while its model continues."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from shared.wire.messages import Finished, FinishReason, Mark, OutputStart, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.asking import tool
from tests.services.gateway.text.asking import chat
from tests.services.gateway.text.test_parsed_replies import chunks, whole

OPEN, HIDDEN = 0, 1
WRITTEN = [
    b"<tool_call>", b"<|x|>", b"Hi ", b'\n{"name": "weather", ', b'"arguments": {"city": "', b"K",
    *(bytes([byte]) for byte in "ö".encode()), b'ln"}', b"} ", b"</tool_call>", b"\n", b" more",
]  # fmt: skip
TABLE = TokenTable(
    np.frombuffer(b"".join(WRITTEN), np.uint8), np.array(list(map(len, WRITTEN)), np.int32)
)
IDS = [2, OPEN, HIDDEN, 3, 4, 5, 6, 7, 8, 9, 10, 11, OPEN, 3, 12, 12]
NUM_KEPT = 10  # up to the call's closing brace
JOB = chat(
    tools=[tool("weather")], parallel_tool_calls=False, logprobs=True, return_token_ids=True,
    stream_options={"include_usage": True}, stream=True,
)  # fmt: skip


def updates_of(sizes: list[int], num: int, reason: FinishReason | None) -> list[ChoiceUpdate]:
    """The first ``num`` tokens, in groups, and the mesh's end, with the last or by itself."""
    updates: list[ChoiceUpdate] = []
    shown, begin = "", 0
    while begin < num:
        size = min(sizes[len(updates) % len(sizes)], num - begin)
        ids = IDS[begin : begin + size]
        marks = []
        for index in range(begin, begin + size):
            before = text_of(IDS[:index])
            if IDS[index] in (OPEN, HIDDEN):
                num_chars = len(WRITTEN[OPEN]) if IDS[index] == OPEN else 0
                marks.append(Mark(len(before), num_chars, index, IDS[index]))
        begin += size
        text = text_of(IDS[:begin])
        arrays = TokenArrays(
            np.array(ids, np.int32), np.full(size, -0.5, np.float32), ranks=np.ones(size, np.int32)
        )
        update = ChoiceUpdate(0, text[len(shown) :], TokenRun(size, 1), arrays, None, marks=marks)
        updates.append(update)
        shown = text
    end = Finished("a~b/0", 1, 0, reason or "stop", num)
    if reason is not None:
        return [*updates[:-1], replace(updates[-1], finished=end)]
    return [*updates, ChoiceUpdate(0, "", TokenRun(0), TokenArrays(), end)]


def text_of(ids: list[int]) -> str:
    written = b"".join(WRITTEN[each] for each in ids if each != HIDDEN)
    return written.decode(errors="ignore")


def counted(updates: list[ChoiceUpdate]) -> list[Any]:
    reply: Any = {"start": OutputStart.ANSWER, "table": TABLE}
    done, stream = whole(JOB, updates, **reply), chunks(JOB, updates, **reply)
    (choice,) = done["choices"]
    choices = [chunk["choices"][0] for chunk in stream if chunk["choices"]]
    logprobs = [each["logprobs"]["content"] for each in choices if each.get("logprobs")]
    ids = [token_id for each in choices for token_id in each.get("token_ids", [])]
    assert [entry for each in logprobs for entry in each] == choice["logprobs"]["content"]
    assert ids == choice["token_ids"]
    assert stream[-1]["usage"] == done["usage"]
    assert choices[-1]["finish_reason"] == choice["finish_reason"]
    message = {key: value for key, value in choice["message"].items() if key != "refusal"}
    return [choice["finish_reason"], message, ids, done["usage"]["completion_tokens"]]


def test_the_tokens_up_to_the_end_of_the_call_count_however_many_came_at_once(
    subtests: pytest.Subtests,
) -> None:
    expected = counted(updates_of([1], NUM_KEPT, None))
    assert expected[0] == "tool_calls"
    assert expected[1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Köln"}'
    assert expected[2:] == [IDS[:NUM_KEPT], NUM_KEPT]
    dice = random.Random(1)
    for _ in range(40):
        sizes = [dice.randint(1, 6) for _ in range(4)]
        num = dice.randint(NUM_KEPT, len(IDS))
        for reason in (None, "stop", "length"):
            with subtests.test(sizes=sizes, num=num, reason=reason):
                assert counted(updates_of(sizes, num, reason)) == expected


def test_a_text_that_ends_within_its_call_counts_as_it_is() -> None:
    for num in range(1, NUM_KEPT):
        assert counted(updates_of([3], num, "length"))[::3] == ["length", num]

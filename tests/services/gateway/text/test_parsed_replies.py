"""Replies to chats with reasoning and tool calls, made from the mesh's updates."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from services.gateway.chat.replies.choice_parser import ChoiceParser, PlainParser
from services.gateway.chat.replies.formats import ChatFormat
from services.gateway.chat.replies.reply import Head, Reply
from services.gateway.chat.replies.writers import EventWriter, WholeWriter
from services.gateway.mesh.job import Job
from services.gateway.mesh.output_collector import ChoiceUpdate
from services.gateway.mesh.token_table import TokenTable
from services.gateway.text.output_parser import output_parsers
from shared.settings.gateway import ReasoningField
from shared.wire.messages import Finished, FinishReason, Mark, OutputStart, TokenRun
from shared.wire.token_arrays import TokenArrays
from tests.services.gateway.asking import tool
from tests.services.gateway.text.asking import chat

MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WRITTEN = [*(marker.encode() for marker in MARKERS), *(b"w%d" % token for token in range(96))]
TABLE = TokenTable(
    np.frombuffer(b"".join(WRITTEN), np.uint8), np.array(list(map(len, WRITTEN)), np.int32)
)
TOOLS = [tool("weather"), tool("time")]
CALL = ["<tool_call>", "\n", '{"name": "weather", "arguments": {"city": "', 'Köln"}}', "\n"]
CALLS = [*CALL, "</tool_call>", "\n", "<tool_call>", '\n{"name": "time"}\n', "</tool_call>"]
THOUGHT = ["<think>", "Hm", "m\n", "</think>", "\n\n"]
USAGE = {"include_usage": True}


@dataclass
class Choice:
    """A tokenizer's messages about one choice; each piece is one token."""

    index: int = 0
    num_chars: int = 0
    num_tokens: int = 0
    updates: list[ChoiceUpdate] = field(default_factory=list)

    def say(self, *pieces: str, num_values: int = 0) -> "Choice":
        for piece in pieces:
            token_id = MARKERS.index(piece) if piece in MARKERS else 50
            marks = [Mark(self.num_chars, len(piece), self.num_tokens, token_id)]
            ids, ranks = np.array([token_id], np.int32), np.ones(num_values, np.int32)
            values = np.full(num_values, -0.5, np.float32)
            arrays = TokenArrays(ids, values, ids[:0], ranks)
            update = ChoiceUpdate(self.index, piece, TokenRun(1, num_values), arrays, None)
            self.updates.append(replace(update, marks=marks if piece in MARKERS else ()))
            self.num_chars += len(piece)
            self.num_tokens += 1
        return self

    def end(self, reason: FinishReason = "stop") -> list[ChoiceUpdate]:
        finished = Finished("a~b/0", 1, self.index, reason, self.num_tokens)
        nothing = ChoiceUpdate(self.index, "", TokenRun(0), TokenArrays(), finished)
        return [*self.updates, nothing]


def reply_to(job: Job, where: ReasoningField = "both", table: TokenTable = TABLE) -> Reply:
    spelling = table.spelling(False) if job.params.logprobs is not None else None
    return Reply(
        format=ChatFormat(),
        head=Head("chatcmpl-x", 1, "fish", "f1"),
        job=job,
        spelling=spelling,
        echoes=[],
        prompt_ids=[np.array([1, 2], np.int32)],
        reasoning_field=where,
    )


def parsers_of(
    job: Job, start: OutputStart = OutputStart.UNDECIDED, table: TokenTable = TABLE
) -> Sequence[ChoiceParser]:
    if job.parsing is None:
        return [PlainParser()] * job.total_choices
    return output_parsers(job, job.parsing, table, [start], "seed")


def whole(
    job: Job,
    updates: list[ChoiceUpdate],
    start: OutputStart = OutputStart.UNDECIDED,
    where: ReasoningField = "both",
    table: TokenTable = TABLE,
) -> Any:
    writer = WholeWriter(reply_to(job, where, table), parsers_of(job, start, table))
    for update in updates:
        writer.add(update)
    return json.loads(b"".join(writer.write()))


def chunks(
    job: Job,
    updates: list[ChoiceUpdate],
    start: OutputStart = OutputStart.UNDECIDED,
    where: ReasoningField = "both",
    table: TokenTable = TABLE,
) -> list[Any]:
    writer = EventWriter(reply_to(job, where, table), parsers_of(job, start, table))
    events = b"".join(b"".join(writer.write(update)) for update in updates).split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-2]]


def accumulated(stream: list[Any], index: int = 0) -> Any:
    """Deltas as added up by OpenAI's client: strings are concatenated, except index and type."""
    message: Any = {}
    for chunk in stream:
        for choice in chunk["choices"]:
            if choice["index"] == index:
                _add(message, choice["delta"])
    return message


def _add(into: Any, delta: Any) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = into.setdefault(key, [])
            for call in value:
                if call["index"] == len(calls):
                    assert call["id"]
                    assert call["type"] == "function"
                    assert call["function"]["name"]
                    assert call["function"]["arguments"] == ""
                    calls.append({})
                _add(calls[call["index"]], call)
        elif isinstance(value, dict):
            _add(into.setdefault(key, {}), value)
        elif key in ("index", "type"):
            into[key] = value
        else:
            into[key] = into.get(key, "") + value


def finish_reasons(stream: list[Any]) -> list[str]:
    reasons = [choice["finish_reason"] for chunk in stream for choice in chunk["choices"]]
    return [reason for reason in reasons if reason]


def test_a_reply_is_divided_into_reasoning_content_and_calls(subtests: pytest.Subtests) -> None:
    calls = [("weather", '{"city": "Köln"}'), ("time", "{}")]
    for pieces, start, expected in [
        (["Hi"], OutputStart.ANSWER, (None, "Hi", [], "stop")),
        ([], OutputStart.ANSWER, (None, None, [], "stop")),
        ([*THOUGHT, "Hi"], OutputStart.UNDECIDED, ("Hmm", "Hi", [], "stop")),
        (["Hm", "</think>", "Hi"], OutputStart.REASONING, ("Hm", "Hi", [], "stop")),
        (CALLS, OutputStart.ANSWER, (None, None, calls, "tool_calls")),
        (["So:\n", *CALLS], OutputStart.ANSWER, (None, "So:", calls, "tool_calls")),
        ([*THOUGHT, *CALLS], OutputStart.UNDECIDED, ("Hmm", None, calls, "tool_calls")),
    ]:
        with subtests.test(pieces=pieces):
            job = chat(tools=TOOLS)
            [choice] = whole(job, Choice().say(*pieces).end(), start)["choices"]
            message = choice["message"]
            found = [
                (call["function"]["name"], call["function"]["arguments"])
                for call in message.get("tool_calls", [])
            ]
            assert message["reasoning"] == message["reasoning_content"] == expected[0]
            assert (message["content"], found) == expected[1:3]
            assert choice["finish_reason"] == expected[3]
            assert ("tool_calls" in message) == bool(found)


def test_the_deltas_of_a_stream_add_up_to_the_whole_reply(subtests: pytest.Subtests) -> None:
    job = chat(tools=TOOLS)
    for pieces in (["Hi", " you"], [*THOUGHT, "So", *CALLS], ["<think>", "cut"], CALL, []):
        updates = Choice().say(*pieces).end()
        for streamed in (updates, [joined(updates)]):
            with subtests.test(pieces=pieces, num_updates=len(streamed)):
                [choice] = whole(job, updates)["choices"]
                stream = chunks(job, streamed)
                sum_of_deltas = accumulated(stream)
                for call in sum_of_deltas.get("tool_calls", []):
                    del call["index"]
                message = choice["message"]
                assert sum_of_deltas.get("tool_calls") == message.get("tool_calls")
                assert (sum_of_deltas.get("content") or None) == message["content"]
                for name in ("reasoning", "reasoning_content"):
                    assert sum_of_deltas.get(name) == message[name]
                assert finish_reasons(stream) == [choice["finish_reason"]]
                assert stream[-1]["choices"][0]["finish_reason"]
                for chunk in stream[1:]:
                    assert len(kinds(chunk)) <= 1


def test_a_long_reply_is_whole_in_fewer_pieces_than_tokens() -> None:
    words = [f"w{number} " for number in range(1000)]
    job = chat(tools=TOOLS)
    writer = WholeWriter(reply_to(job), parsers_of(job, OutputStart.REASONING))
    for update in Choice().say(*words, "</think>", *words, "</tool_call>").end():
        writer.add(update)
    assert len(writer._choices[0].events) < 100
    message = json.loads(b"".join(writer.write()))["choices"][0]["message"]
    assert message["reasoning"] == "".join(words).rstrip()
    assert message["content"].startswith("".join(words).rstrip())


def joined(updates: list[ChoiceUpdate]) -> ChoiceUpdate:
    """All at once, as a lagging reader gets it."""
    return replace(
        updates[-1],
        text="".join(update.text for update in updates),
        marks=[mark for update in updates for mark in update.marks],
    )


def kinds(chunk: Any) -> set[str]:
    [choice] = chunk["choices"]
    return {name.removesuffix("_content") for name in choice["delta"]}


def test_the_finish_reason_says_whether_a_call_is_whole(subtests: pytest.Subtests) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    reason: Any
    for choice, pieces, reason, expected in [
        ("auto", CALLS, "stop", "tool_calls"),
        ("required", CALLS, "stop", "tool_calls"),
        ("required", CALL, "length", "length"),
        ("required", ["<think>", "Hm"], "length", "length"),
        (named, CALL, "stop", "stop"),
        (named, CALL[:3], "length", "length"),
        ("auto", ["Hi"], "stop", "stop"),
        ("auto", CALLS, "abort", "abort"),
    ]:
        with subtests.test(choice=choice, reason=reason):
            job = chat(tools=TOOLS, tool_choice=choice)
            updates = Choice().say(*pieces).end(reason)
            assert whole(job, updates)["choices"][0]["finish_reason"] == expected
            assert finish_reasons(chunks(job, updates)) == [expected]


def test_without_tools_a_lookalike_of_a_call_is_content() -> None:
    fields: Any
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        [choice] = whole(chat(**fields), Choice().say(*THOUGHT, *CALL).end())["choices"]
        assert choice["message"]["content"] == "".join(CALL)
        assert choice["finish_reason"] == "stop"


def test_reasoning_stands_in_the_fields_of_the_setting() -> None:
    updates = Choice().say(*THOUGHT, "Hi").end()
    where: Any
    for where, names in [
        ("both", {"reasoning", "reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("reasoning_content", {"reasoning_content"}),
    ]:
        [choice] = whole(chat(), updates, where=where)["choices"]
        assert choice["message"].keys() == {"role", "content", "refusal"} | names
        stream = accumulated(chunks(chat(), updates, where=where))
        assert stream.keys() == {"role", "content"} | names


def test_reasoning_that_the_client_does_not_want_is_dropped_and_counted() -> None:
    updates = Choice().say(*THOUGHT, "Hi").end()
    job = chat(include_reasoning=False)
    reply = whole(job, updates)
    assert reply["choices"][0]["message"] == {"role": "assistant", "content": "Hi", "refusal": None}
    assert accumulated(chunks(job, updates)) == {"role": "assistant", "content": "Hi"}
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_reasoning_that_is_not_separated_is_content() -> None:
    """If calls are parsed too, it loses surrounding blanks."""
    fields: Any
    for fields, text in (
        ({}, "<think>Hmm\n</think>\n\nHi"),
        ({"tools": TOOLS}, "<think>Hmm</think>Hi"),
    ):
        job = chat(separate_reasoning=False, **fields)
        updates = Choice().say(*THOUGHT, "Hi").end()
        [choice] = whole(job, updates)["choices"]
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
        assert accumulated(chunks(job, updates)) == {"role": "assistant", "content": text}


def test_a_call_within_reasoning_is_none_though_it_is_not_separated() -> None:
    job = chat(separate_reasoning=False, tools=TOOLS)
    [choice] = whole(job, Choice().say("<think>", *CALLS, "</think>", "Hi").end())["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_the_usage_counts_reasoning_of_all_choices() -> None:
    first = Choice(0).say(*THOUGHT, "Hi").end()
    second = Choice(1).say("Hi").end()
    job = chat(n=2, stream=True, stream_options=USAGE)
    for usage in (
        whole(job, [*first, *second])["usage"],
        chunks(job, [*first, *second])[-1]["usage"],
    ):
        assert usage["completion_tokens"] == len(THOUGHT) + 2
        assert usage["completion_tokens_details"] == {"reasoning_tokens": 2}


def test_the_usage_counts_no_token_that_ends_the_text_within_its_reasoning() -> None:
    """The last of these three tokens is an end of text, or the one after which the text was cut."""
    updates = Choice().say("<think>", "Hm", "m").end()
    end = replace(updates[-1], finished=Finished("a~b/0", 1, 0, "stop", 4))
    assert end.finished is not None
    cases: list[tuple[Finished, dict[str, Any], int]] = [
        (end.finished, {}, 2),
        (structs.replace(end.finished, stop_reason=7), {}, 2),
        (structs.replace(end.finished, stop_reason="mm"), {}, 3),
        (structs.replace(end.finished, reason="length"), {}, 3),
        (structs.replace(end.finished, stop_reason=7), {"include_stop_str_in_output": True}, 3),
    ]
    for finished, fields, expected in cases:
        done = [*updates[:-1], replace(end, finished=finished)]
        for usage in (
            whole(chat(**fields), done)["usage"],
            chunks(chat(stream=True, stream_options=USAGE, **fields), done)[-1]["usage"],
        ):
            assert usage["completion_tokens_details"] == {"reasoning_tokens": expected}


def test_the_usage_counts_no_reasoning_where_a_marker_was_text_or_none_is_looked_for() -> None:
    job = chat()
    marked = Choice().say(*THOUGHT, "Hi").end()
    unmarked = [replace(update, marks=()) for update in marked]
    table = TokenTable(np.zeros(0, np.uint8), np.zeros(100, np.int32))
    reply = whole(job, unmarked, table=table)
    assert reply["choices"][0]["message"]["reasoning"] == "Hmm"
    assert "completion_tokens_details" not in reply["usage"]
    unseparated = whole(chat(separate_reasoning=False, tools=TOOLS), marked)
    assert "completion_tokens_details" not in unseparated["usage"]


def test_every_token_has_its_logprob_and_its_id_in_one_chunk() -> None:
    pieces = [*THOUGHT, "So", *CALLS]
    fields: Any
    for fields in ({}, {"include_reasoning": False}):
        job = chat(tools=TOOLS, logprobs=True, return_token_ids=True, **fields)
        choice = Choice().say(*pieces, num_values=1)
        ids = [int(update.arrays.ids[0]) for update in choice.updates]
        [only] = whole(job, choice.end())["choices"]
        assert len(only["logprobs"]["content"]) == len(pieces)
        assert only["token_ids"] == ids
        stream = [each["choices"][0] for each in chunks(job, choice.end())]
        entries = [len(each["logprobs"]["content"]) for each in stream if each["logprobs"]]
        assert sum(entries) == len(pieces)
        assert [each for chunk in stream for each in chunk.get("token_ids", [])] == ids


def test_later_calls_are_dropped_without_parallel_tool_calls() -> None:
    job = chat(tools=TOOLS, parallel_tool_calls=False)
    updates = Choice().say(*CALLS).end()
    [choice] = whole(job, updates)["choices"]
    assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    assert len(accumulated(chunks(job, updates))["tool_calls"]) == 1
    for kind in (EventWriter, WholeWriter):
        writer: Any = kind(reply_to(job), parsers_of(job, OutputStart.ANSWER))
        over = []
        for update in updates[:-1]:
            list(writer.write(update)) if kind is EventWriter else writer.add(update)
            over.append(writer.is_over(update))
        assert over[-1]
        assert not any(over[:3])


def test_openais_older_fields_are_answered_with_its_older_fields() -> None:
    job = chat(functions=[each["function"] for each in TOOLS])
    updates = Choice().say(*CALLS).end()
    [choice] = whole(job, updates)["choices"]
    call = {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert choice["message"]["function_call"] == call
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "function_call"
    stream = chunks(job, updates)
    assert accumulated(stream)["function_call"] == call
    assert finish_reasons(stream) == ["function_call"]


def test_an_echoed_text_comes_before_the_content_and_before_the_first_token() -> None:
    begun = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "Once "}]
    job = chat(messages=begun, echo=True, continue_final_message=True)
    updates = Choice().say("upon").end()
    assert whole(job, updates)["choices"][0]["message"]["content"] == "Once upon"
    assert accumulated(chunks(job, updates))["content"] == "Once upon"
    assert accumulated(chunks(job, Choice().end()))["content"] == "Once "


def test_a_stream_may_have_its_usage_in_every_chunk() -> None:
    options = USAGE | {"continuous_usage_stats": True}
    job = chat(stream=True, stream_options=options)
    stream = chunks(job, Choice().say(*THOUGHT, "Hi").end())
    counts = [chunk["usage"]["completion_tokens"] for chunk in stream]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == len(THOUGHT) + 1
    assert stream[-1]["choices"] == []
    assert {chunk["usage"]["prompt_tokens"] for chunk in stream} == {2}

"""Markers separate reasoning from the answer, and its tokens are counted."""

import pytest

from services.gateway.text.machine import OutputMachine
from shared.wire.messages import OutputStart
from tests.services.gateway.text.call_texts import kimi_k3
from tests.services.gateway.text.replies import (
    Told,
    all_cuts,
    cut,
    hidden,
    markers_of,
    marks_of,
    rules,
    run,
    told,
)

ANSWER, REASONING, UNDECIDED = OutputStart.ANSWER, OutputStart.REASONING, OutputStart.UNDECIDED
NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
CALL = ("call", "now", "{}")
HM = ("reasoning", "hm")
ATEM = '<atem:function_calls><atem:invoke name="now"></atem:invoke></atem:function_calls>'
HI = ("content", "Hi")

TEXTS: list[tuple[str, str, OutputStart, str, list[Told]]] = [
    # format of calls, of reasoning, where the prompt ended, text, what it is
    ("", "qwen3", UNDECIDED, "<think>\nhm\n</think>\n\nHi", [HM, HI]),
    ("", "qwen3", UNDECIDED, "\n<think>hm</think>Hi\n", [HM, ("content", "Hi\n")]),
    ("", "qwen3", UNDECIDED, "<think>\n\n</think>\n\nHi", [HI]),
    ("", "qwen3", UNDECIDED, " Hi <think> there", [("content", " Hi <think> there")]),
    ("", "qwen3", ANSWER, "Hi </think> there", [("content", "Hi </think> there")]),
    ("", "qwen3", ANSWER, "<think>hm</think>Hi", [HM, HI]),
    ("", "qwen3", UNDECIDED, "<think>\nhm\n", [("reasoning", "hm\n")]),
    ("", "qwen3", UNDECIDED, "<think>\nhm\n</think>\n\n", [HM]),
    ("", "qwen3", UNDECIDED, "<thin", [("content", "<thin")]),
    ("", "qwen3", UNDECIDED, "<think>a\n</thin b", [("reasoning", "a\n</thin b")]),
    ("", "qwen3", UNDECIDED, "", []),
    ("", "qwen3", UNDECIDED, "\n", [("content", "\n")]),
    ("", "deepseek_r1", REASONING, "hm\n</think>\n\nHi", [HM, HI]),
    ("", "deepseek_r1", REASONING, "<think>\nhm\n</think>\n\nHi", [HM, HI]),
    ("", "deepseek_r1", REASONING, "hm", [HM]),
    ("hermes", "qwen3", UNDECIDED, f"<think>\nhm\n</think>\n\n{NOW}", [HM, CALL]),
    ("hermes", "qwen3", UNDECIDED, f"<think>{NOW}</think>Hi", [("reasoning", NOW), HI]),
    ("hermes", "qwen3", UNDECIDED, f"<think>hm</think>\nHi\n{NOW}", [HM, HI, CALL]),
    ("llama3_json", "qwen3", REASONING, 'hm</think>{"name": "now"}', [HM, CALL]),
    ("ernie45", "ernie45", REASONING, f"hm\n</think>\n\n\n{NOW}\n", [HM, CALL]),
    ("ernie45", "ernie45", REASONING, "hm\n</think>\n\n<response>\nHi\n</response>\n", [HM, HI]),
    ("mistral", "mistral", UNDECIDED, "[THINK]hm[/THINK]Hi", [HM, HI]),
    ("seed_oss", "seed_oss", UNDECIDED, "<seed:think>hm</seed:think>Hi", [HM, HI]),
    ("granite", "granite", UNDECIDED, "Here is my thought process:\nhm\n\nHere is my response:\nHi",
     [HM, HI]),
    ("hermes", "hy_v3_opensource", REASONING, "hm</think:opensource>Hi", [HM, HI]),
    ("", "minimax_m3", UNDECIDED, "<mm:think>hm</mm:think>Hi", [HM, HI]),
    ("", "gemma4", UNDECIDED, "<|channel>thought\nhm\n<channel|>Hi", [HM, HI]),
    ("", "gemma4", UNDECIDED, "<|channel>thought\n<channel|>Hi", [HI]),
    ("", "gemma4", UNDECIDED, "<|channel>thoughts<channel|>Hi", [("reasoning", "thoughts"), HI]),
    ("", "gemma4", REASONING, "hm<channel|>Hi", [HM, HI]),
    ("kimi_k3", "kimi_k3", REASONING,
     "hm<|close|>think<|sep|><|open|>response<|sep|>Hi<|close|>response<|sep|>"
     + kimi_k3('<call tool="now" index="1"></call>') + "<|close|>message<|sep|>", [HM, HI, CALL]),
    ("kimi_k3", "kimi_k3", ANSWER,
     "<|sep|>Hi <|open|> there<|close|>response<|sep|><|close|>message<|sep|>",
     [("content", "<|sep|>Hi <|open|> there")]),
    ("openai", "openai_gptoss", UNDECIDED,
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hi"
     "<|return|>", [HM, HI]),
    ("openai", "openai_gptoss", UNDECIDED,
     "<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.now"
     "<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", [HM, CALL]),
    ("inkling", "inkling", UNDECIDED,
     "<|content_thinking|>hm<|end_message|><|message_model|><|content_text|>Hi<|end_message|>"
     '<|message_model|>now<|content_invoke_tool_json|>{"name":"now","args":{}}<|end_message|>'
     "<|content_model_end_sampling|>", [HM, HI, CALL]),
    ("muse_glimmer", "muse_glimmer", UNDECIDED,
     " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Hi<|eom|><|start|>"
     'assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">\n</atem:invoke>'
     "\n</atem:function_calls><|eot|>", [HM, HI, CALL]),
    ("", "muse_glimmer", UNDECIDED, "<|message|>Hi<|eot|>", [HI]),
    ("", "muse_glimmer", REASONING, "hm<|eom|><|start|>assistant to=us", [HM]),
    ("muse_glimmer", "", UNDECIDED, " to=self<|message|>Hi<|eom|>", [HI]),
    ("muse_glimmer", "muse_glimmer", UNDECIDED,
     f" to=user<|message|>{ATEM}<|eom|><|start|>assistant to=self<|message|>{ATEM}<|eom|>",
     [("content", ATEM), ("reasoning", ATEM)]),
    ("", "inkling", REASONING, "hm<|end_message|><|message_model|><|content_text|>Hi", [HM, HI]),
    ("", "inkling", ANSWER, "Hi<|end_message|><|content_model_end_sampling|>", [HI]),
    ("inkling", "", UNDECIDED, "<|content_thinking|>Hi<|end_message|>", [HI]),
    ("", "openai_gptoss", UNDECIDED, "no channels", [("content", "no channels")]),
    ("", "openai_gptoss", ANSWER, "Hi<|return|>", [HI]),
    ("", "openai_gptoss", REASONING, "hm<|end|><|start|>assistant<|channel|>fin", [HM]),
]  # fmt: skip


@pytest.mark.parametrize("has_tokens", [True, False])
def test_reasoning_is_the_same_however_the_text_is_cut(has_tokens: bool, subtests: pytest.Subtests):
    for tools, reasoning, start, text, expected in TEXTS:
        of = rules(tools, reasoning)
        of = rules(tools, reasoning, added_tokens=markers_of(of) if has_tokens else ())
        marks = marks_of(text, markers_of(of)) if has_tokens else []
        with subtests.test(tools=tools, reasoning=reasoning, text=text):
            for pieces in all_cuts(text, marks, 20):
                assert told(run(of, pieces, start)) == expected, pieces


def test_tokens_between_the_markers_count_as_reasoning(subtests: pytest.Subtests):
    """Every character outside markers is a token here."""
    counted = [
        ("qwen3", UNDECIDED, "<think>abc</think>de", 6, 3),
        ("qwen3", UNDECIDED, "\n<think>abc</think>de", 7, 3),
        ("qwen3", UNDECIDED, "<think>abc", 4, 3),
        ("qwen3", UNDECIDED, "abc", 3, 0),
        ("deepseek_r1", REASONING, "abc</think>de", 6, 3),
        ("deepseek_r1", REASONING, "abc", 3, 3),
        ("inkling", UNDECIDED, "<|content_thinking|>abc<|end_message|>", 5, 3),
        ("gemma4", UNDECIDED, "<|channel>abc<channel|>", 5, 3),
        ("openai_gptoss", UNDECIDED, "<|channel|>analysis<|message|>abc<|end|>", 13, 3),
    ]
    for name, start, text, num_tokens, expected in counted:
        of = rules(reasoning=name, added_tokens=markers_of(rules(reasoning=name)))
        marks = marks_of(text, markers_of(of))
        for shown, places in ((text, marks), hidden(text, marks)):
            with subtests.test(name=name, text=shown):
                machine = OutputMachine(of, start, "id/0")
                machine.push(shown, places)
                machine.finish()
                assert machine.num_reasoning_tokens(num_tokens) == expected


def test_tokens_of_reasoning_are_not_known_where_its_markers_are_text():
    machine = OutputMachine(rules(reasoning="qwen3"), UNDECIDED, "id/0")
    machine.push("<think>abc</think>de")
    assert machine.num_reasoning_tokens(20) is None


def test_tokens_that_are_not_shown_make_markers_with_the_text_between_them():
    of = rules("kimi_k3", "kimi_k3")
    of = rules("kimi_k3", "kimi_k3", added_tokens=markers_of(of))
    whole = (
        "hm<|sep|><|close|>think<|sep|><|open|>response<|sep|>Hi <|open|>there"
        "<|close|>response<|sep|>"
    )
    text, marks = hidden(whole, marks_of(whole, markers_of(of)))
    for pieces in all_cuts(text, marks, 20):
        assert told(run(of, pieces, REASONING)) == [HM, ("content", "Hi there")]


def test_a_text_that_looks_like_a_marker_is_text_where_that_is_a_token():
    of = rules("hermes", "qwen3", added_tokens=markers_of(rules("hermes", "qwen3")))
    text = f"hm </think> <tool_call></think>Hi {NOW}"
    [close] = [mark for mark in marks_of(text, ["</think>"]) if mark.position > 20]
    assert told(run(of, cut(text, [close], []), REASONING)) == [
        ("reasoning", "hm </think> <tool_call>"),
        ("content", f"Hi {NOW}"),
    ]

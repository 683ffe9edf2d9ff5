"""Structural tags constrain the parts they name, and leave the other text free."""

import json
from typing import Any

import pytest

from services.tokenizer.guides.compose import Wanted, compose
from shared.errors import InvalidRequest
from shared.wire.messages import OutputFormat, OutputStart
from tests.services.tokenizer.guides.conftest import Vocabulary, vocabulary_with

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
CALL = {"type": "tag", "begin": "<call=f>", "content": NUMBER, "end": "</call>"}
WORD = {"type": "tag", "begin": "<w>", "content": {"type": "regex", "pattern": ".+"}, "end": "</w>"}
THOUGHT = {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def triggered(**options: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<call"], "tags": [CALL], **options}


# a format, accepted texts, refused texts
CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
    (text("done"), ["done"], ["do", "done."]),
    (CALL, ["<call=f>12</call>"], ["<call=f>x</call>", "<call=g>1</call>", "<call=f>1"]),
    (WORD, ["<w>a <b> c</w>"], ["<w></w>", "<w>a"]),
    ({"type": "sequence", "elements": [THOUGHT, NUMBER]}, ["<t>a < b</t>5"], ["5", "<t>5"]),
    ({"type": "or", "elements": [text("a"), CALL]}, ["a", "<call=f>1</call>"], ["b", "a<call"]),
    ({"type": "optional", "content": text("a")}, ["", "a"], ["aa"]),
    ({"type": "star", "content": WORD}, ["", "<w>a</w><w>b</w>"], ["<w>a</w><w>"]),
    ({"type": "plus", "content": text("ab")}, ["ab", "abab"], ["", "aba"]),
    ({"type": "repeat", "min": 1, "max": 2, "content": text("a")}, ["a", "aa"], ["", "aaa"]),
    ({"type": "grammar", "grammar": 'root ::= "x" "y"?'}, ["x", "xy"], ["y"]),
    ({"type": "any_text"}, ["", "a {1}\n"], []),
    (triggered(), ["", "free < text", "a <call=f>1</call> b <call=f>2</call>"], ["<call=f>x"]),
    (
        triggered(tags=[{key: CALL[key] for key in ("begin", "content", "end")}]),
        ["<call=f>1</call>"],
        ["<call=f>x"],
    ),
    (triggered(at_least_one=True), ["<call=f>1</call>", "a <call=f>1</call> b"], ["a"]),
    (
        triggered(at_least_one=True, stop_after_first=True),
        ["a <call=f>1</call>"],
        ["<call=f>1</call> b"],
    ),
    (
        {"type": "tags_with_separator", "tags": [CALL, WORD], "separator": ", "},
        ["", "<call=f>1</call>", "<w>a</w>, <call=f>1</call>"],
        ["<call=f>1</call><w>a</w>", ", "],
    ),
]
OLD = {
    "structures": [{"begin": "<call=f>", "schema": {"type": "integer"}, "end": "</call>"}],
    "triggers": ["<call="],
}


def grammar_of(vocabulary: Vocabulary, tag: dict[str, Any]) -> str:
    value = json.dumps({"type": "structural_tag", **tag})
    format = OutputFormat("structural_tag", "response_format", value)
    guide = compose(vocabulary.dialect(), Wanted(format), OutputStart.ANSWER)
    assert guide is not None
    return guide.grammar


def test_texts_of_a_tag_are_taken_and_others_refused(vocabulary: Vocabulary, subtests):
    for tag, taken, refused in CASES:
        grammar = grammar_of(vocabulary, {"format": tag})
        for each in taken:
            with subtests.test(type=tag["type"], taken=each):
                assert vocabulary.refusal(grammar, each) is None
        for each in refused:
            with subtests.test(type=tag["type"], refused=each):
                assert vocabulary.refusal(grammar, each) is not None


def test_the_old_form_is_read(vocabulary: Vocabulary):
    grammar = grammar_of(vocabulary, OLD)
    assert vocabulary.refusal(grammar, "so <call=f>12</call>, so") is None
    assert vocabulary.refusal(grammar, "so <call=g>12</call>") is not None


def test_markers_that_are_tokens_begin_and_end_tags():
    vocabulary = vocabulary_with("<tool_call>", "</tool_call>")
    call = {"begin": '<tool_call>{"a": ', "schema": {"type": "integer"}, "end": "}</tool_call>"}
    grammar = grammar_of(vocabulary, {"structures": [call], "triggers": ["<tool_call>"]})
    assert vocabulary.refusal(grammar, 'so <tool_call>{"a": 1}</tool_call>!') is None
    assert vocabulary.refusal(grammar, 'so <tool_call>{"b": 1}</tool_call>!') is not None


@pytest.mark.parametrize(
    ("tag", "param"),
    [
        ({"format": {"type": "dance"}}, "response_format.format"),
        ({"format": {**CALL, "content": {}}}, "response_format.format.content"),
        (
            {"format": {"type": "sequence", "elements": [text("a"), {"type": "tag"}]}},
            "response_format.format.elements[1]",
        ),
        ({"format": {"type": "star", "content": {"type": "any_text"}}}, "response_format.format"),
        ({"format": triggered(triggers=["<other"])}, "response_format.format.tags[0]"),
        (
            {"format": triggered(tags=[{"type": "sequence", "elements": []}])},
            "response_format.format.tags[0]",
        ),
        ({"structures": [], "triggers": []}, "response_format"),
        ({"structures": ["no"], "triggers": ["<"]}, "response_format.structures[0]"),
        ({}, "response_format"),
        (
            {"format": {"type": "repeat", "min": 1, "max": 10**6, "content": text("a")}},
            "response_format.format",
        ),
    ],
)
def test_a_malformed_tag_is_refused_by_its_place(
    vocabulary: Vocabulary, tag: dict[str, Any], param: str
):
    with pytest.raises(InvalidRequest) as refused:
        grammar_of(vocabulary, tag)
    assert refused.value.param == param

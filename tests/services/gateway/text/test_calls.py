"""Every format of calls, and mistakes in it: the same events however it is cut."""

import json

import pytest

from shared.wire.messages import OutputStart
from tests.services.gateway.text.call_texts import GOOD, HARD, coder, weather
from tests.services.gateway.text.replies import (
    all_cuts,
    cut,
    hidden,
    markers_of,
    marks_of,
    rules,
    run,
    told,
)

NUM_CUTS = 10  # as tokens, and again as text


@pytest.mark.parametrize("has_tokens", [True, False])
def test_calls_are_the_same_however_the_text_is_cut(has_tokens: bool, subtests: pytest.Subtests):
    for name, text, expected in GOOD + HARD:
        of = rules(name, added_tokens=markers_of(rules(name)) if has_tokens else ())
        marks = marks_of(text, markers_of(of)) if has_tokens else []
        with subtests.test(name=name, text=text):
            for pieces in all_cuts(text, marks, NUM_CUTS):
                assert told(run(of, pieces, OutputStart.UNDECIDED)) == expected, pieces


def test_hidden_markers_work_like_shown_ones(subtests: pytest.Subtests):
    for name, whole, expected in GOOD:
        of = rules(name, added_tokens=markers_of(rules(name)))
        text, marks = hidden(whole, marks_of(whole, markers_of(of)))
        with subtests.test(name=name, text=text):
            for pieces in all_cuts(text, marks, NUM_CUTS // 3):
                assert told(run(of, pieces, OutputStart.UNDECIDED)) == expected, pieces


def test_arguments_of_good_calls_are_json():
    for name, text, _ in GOOD:
        for kind, *rest in told(run(rules(name), cut(text, [], []), OutputStart.UNDECIDED)):
            assert kind != "call" or isinstance(json.loads(rest[1]), dict)


def test_a_marker_of_text_is_text_in_a_string_of_json_that_ends_in_its_line():
    quoted = '["a</parameter>\\"", "</parameter>"]'
    for value, expected in (
        (quoted, weather(f'{{"tags": {quoted}}}')),
        ('["a]', weather(r'{"tags": "[\"a]"}')),
    ):
        text = coder(f"<parameter=tags>\n{value}\n</parameter>\n")
        for pieces in all_cuts(text, [], NUM_CUTS):
            assert told(run(rules("qwen3_coder"), pieces, OutputStart.ANSWER)) == [expected]

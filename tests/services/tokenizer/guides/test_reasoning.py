"""A reasoning model's grammar begins after its reasoning."""

import pytest

from services.tokenizer.guides.compose import Wanted, compose
from shared.errors import InvalidRequest
from shared.wire.messages import Guide, OutputFormat, OutputStart
from tests.services.tokenizer.guides.conftest import Vocabulary, vocabulary_with

OBJECT = OutputFormat("json_object", "response_format")
CHOICE = OutputFormat("choice", "guided_choice", '["yes", "no"]')


@pytest.fixture(scope="module")
def thinking() -> Vocabulary:
    return vocabulary_with("<think>", "</think>")


def guide_of(vocabulary: Vocabulary, wanted: Wanted, start: OutputStart, name="qwen3") -> Guide:
    guide = compose(vocabulary.dialect(reasoning=name), wanted, start)
    assert guide is not None
    return guide


def test_the_gate_is_made_of_the_markers_and_the_start(thinking: Vocabulary):
    opening, close = thinking.added["<think>"], thinking.added["</think>"]
    answer = guide_of(thinking, Wanted(OBJECT), OutputStart.ANSWER)
    assert (answer.is_open, answer.open_ids, answer.close_ids) == (False, [], [])
    reasoning = guide_of(thinking, Wanted(OBJECT), OutputStart.REASONING)
    assert (reasoning.is_open, reasoning.open_ids, reasoning.close_ids) == (True, [], [close])
    undecided = guide_of(thinking, Wanted(OBJECT), OutputStart.UNDECIDED)
    assert (undecided.is_open, undecided.open_ids) == (False, [opening])
    assert undecided.close_ids == [close]


def test_blanks_may_stand_between_reasoning_and_answer(thinking: Vocabulary):
    for format, text in ((OBJECT, "{}"), (CHOICE, "yes")):
        guide = guide_of(thinking, Wanted(format), OutputStart.REASONING)
        assert thinking.refusal(guide.grammar, f"\n\n{text}") is None
        assert thinking.refusal(guide.grammar, text) is None
    exact = guide_of(thinking, Wanted(CHOICE), OutputStart.ANSWER)
    assert thinking.refusal(exact.grammar, "\n\nyes") is not None


def test_markers_that_are_text_are_part_of_the_grammar(vocabulary: Vocabulary):
    open_guide = guide_of(vocabulary, Wanted(CHOICE), OutputStart.REASONING)
    assert open_guide.close_ids == []
    assert vocabulary.refusal(open_guide.grammar, "hm < hm</think>\n\nyes") is None
    assert vocabulary.refusal(open_guide.grammar, "yes") is not None
    assert vocabulary.refusal(open_guide.grammar, "hm</think>perhaps") is not None
    undecided = guide_of(vocabulary, Wanted(CHOICE), OutputStart.UNDECIDED).grammar
    assert vocabulary.refusal(undecided, "<think>hm</think>no") is None
    assert vocabulary.refusal(undecided, "no") is None
    assert vocabulary.refusal(undecided, "hm</think>no") is not None


def test_markers_around_the_answer_may_be_there(thinking: Vocabulary):
    grammar = guide_of(thinking, Wanted(OBJECT), OutputStart.REASONING, "ernie45").grammar
    assert thinking.refusal(grammar, "\n\n<response>\n{}\n</response>") is None
    assert thinking.refusal(grammar, "\n\n{}") is None


def test_a_budget_forces_the_marker_and_the_text_before_it(thinking: Vocabulary):
    guide = guide_of(thinking, Wanted(budget=5), OutputStart.REASONING)
    assert guide.budget == 5
    assert guide.grammar == ""
    assert thinking.tokenizer.decode(guide.forced_ids) == "\n</think>"
    assert guide.forced_ids[-1] in guide.close_ids


def test_a_budget_changes_nothing_where_nothing_is_reasoned(thinking: Vocabulary):
    dialect = thinking.dialect(reasoning="qwen3")
    assert compose(dialect, Wanted(budget=5), OutputStart.ANSWER) is None


def test_a_budget_needs_reasoning_in_markers_that_are_tokens(
    thinking: Vocabulary, vocabulary: Vocabulary
):
    for dialect in (thinking.dialect(), vocabulary.dialect(reasoning="qwen3")):
        with pytest.raises(InvalidRequest) as refused:
            compose(dialect, Wanted(budget=5), OutputStart.REASONING)
        assert refused.value.param == "reasoning_budget"


def test_markers_of_several_tokens_frame_the_answer_and_the_calls():
    kimi = vocabulary_with("<|open|>", "<|close|>", "<|sep|>")
    response = "<|open|>response<|sep|>yes<|close|>response<|sep|><|close|>message<|sep|>"
    grammar = guide_of(kimi, Wanted(CHOICE), OutputStart.REASONING, "kimi_k3").grammar
    assert kimi.refusal(grammar, f"hm<|close|>think<|sep|>{response}") is None
    assert kimi.refusal(grammar, f"hm{response}") is not None
    grammar = guide_of(kimi, Wanted(CHOICE), OutputStart.ANSWER, "kimi_k3").grammar
    assert kimi.refusal(grammar, "yes<|close|>response<|sep|>") is None


def test_nothing_is_held_where_nothing_is_asked(thinking: Vocabulary):
    dialect = thinking.dialect("hermes", "qwen3")
    assert compose(dialect, Wanted(), OutputStart.UNDECIDED) is None

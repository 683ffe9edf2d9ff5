"""From a request to its guide."""

import json

import msgspec
import numpy as np
import pytest

from services.tokenizer.guides import grammar_check
from services.tokenizer.guides.guides import Guides, guides_for
from services.tokenizer.lanes import Lanes
from services.tokenizer.text_model import TextModel
from shared.errors import InvalidRequest, Unavailable
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import (
    ChatOptions,
    ChoiceStart,
    OutputFormat,
    OutputStart,
    SamplingParams,
    Submit,
    TextOptions,
    ToolChoice,
)
from tests.services.tokenizer.guides.conftest import vocabulary_with
from tests.services.tokenizer.guides.test_calls import TOOLS
from tests.services.tokenizer.guides.test_grammar_check import read_vocabulary

NUM_IDS_OF_MODEL = 8184  # fewer than the tokenizer has


@pytest.fixture
async def guides():
    vocabulary, lanes = vocabulary_with(), Lanes(1)
    guides = Guides(vocabulary.dialect("hermes", "qwen3"), read_vocabulary, lanes)
    yield guides
    await guides.close()
    lanes.close()


def submitted(**fields) -> Submit:
    params, text = SamplingParams(seed=0), TextOptions()
    return Submit("r~1/0", 1, "chat", params, text, [ChoiceStart(0)], **fields)


async def test_a_request_that_asks_for_nothing_has_no_guide(guides: Guides):
    assert await guides.guide_of(submitted(), OutputStart.UNDECIDED) is None
    documents = ChatOptions(documents='[{"text": "a"}]')
    assert await guides.guide_of(submitted(chat=documents), OutputStart.ANSWER) is None


async def test_formats_and_tools_become_a_guide(guides: Guides):
    format = OutputFormat("regex", "guided_regex", "[a-c]+")
    guide = await guides.guide_of(submitted(format=format), OutputStart.ANSWER)
    assert guide is not None
    assert vocabulary_with().refusal(guide.grammar, "abc") is None
    chat = ChatOptions(tools=TOOLS)
    required = submitted(chat=chat, tool_choice=ToolChoice("required"))
    guide = await guides.guide_of(required, OutputStart.ANSWER)
    assert guide is not None
    text = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert vocabulary_with().refusal(guide.grammar, text) is None


async def test_an_unforeseen_error_is_the_requests(guides: Guides, monkeypatch: pytest.MonkeyPatch):
    def break_down(*_: object) -> None:
        raise ValueError

    monkeypatch.setattr("services.tokenizer.guides.guides.compose", break_down)
    format = OutputFormat("regex", "guided_regex", "[a-c]+")
    with pytest.raises(InvalidRequest, match="guided_regex"):
        await guides.guide_of(submitted(format=format), OutputStart.ANSWER)


async def test_a_reference_by_a_number_of_any_length_is_refused(guides: Guides):
    schema = {"anyOf": [{"type": "string"}], "$ref": "#/anyOf/" + "9" * 5000}
    format = OutputFormat("json_schema", "response_format", json.dumps(schema))
    with pytest.raises(InvalidRequest, match="response_format"):
        await guides.guide_of(submitted(format=format), OutputStart.ANSWER)


async def test_the_same_request_has_the_same_guide_again(guides: Guides):
    """A replay continues from the ids of the first attempt."""
    chat = ChatOptions(tools=TOOLS)
    format = OutputFormat("json_schema", "response_format", json.dumps({"properties": {"a": {}}}))
    submit = submitted(chat=chat, format=format)
    first = await guides.guide_of(submit, OutputStart.REASONING)
    assert first == await guides.guide_of(submit, OutputStart.REASONING)


async def test_the_grammar_of_a_replay_is_not_tried_again(
    guides: Guides, monkeypatch: pytest.MonkeyPatch
):
    """A busier tokenizer might lack time for it, in the middle of an output."""
    format = OutputFormat("regex", "guided_regex", "[a-c]+")
    submit = submitted(format=format)
    monkeypatch.setattr(grammar_check, "MAX_WAITING", 0)
    with pytest.raises(Unavailable):
        await guides.guide_of(submit, OutputStart.ANSWER)
    replay = msgspec.structs.replace(submit, choices=[ChoiceStart(0), ChoiceStart(1, num_ids=3)])
    guide = await guides.guide_of(replay, OutputStart.ANSWER)
    assert guide is not None
    assert guide.grammar


async def test_the_tokenizer_may_know_more_ids_than_the_model():
    """Some folders have a tokenizer made for several models."""
    text, lanes = TextModel(EMBEDDED_MODEL, 4096, NUM_IDS_OF_MODEL), Lanes(1)
    assert text.num_token_ids > NUM_IDS_OF_MODEL
    guides = guides_for(text, lanes)
    format = OutputFormat("regex", "guided_regex", "[a-c]+")
    assert await guides.guide_of(submitted(format=format), OutputStart.ANSWER) is not None
    await guides.close()
    lanes.close()


async def test_an_unenforceable_schema_is_the_clients_error(guides: Guides):
    format = OutputFormat("regex", "guided_regex", "a(?=b)")
    with pytest.raises(InvalidRequest) as refused:
        await guides.guide_of(submitted(format=format), OutputStart.ANSWER)
    assert refused.value.param == "guided_regex"
    assert "look-around" in refused.value.message


async def test_an_error_names_the_part_and_speaks_of_nothing_that_is_ours(
    guides: Guides, subtests: pytest.Subtests
):
    one_of = {"properties": {"a": {"oneOf": [{"type": "object"}, {"type": "object"}]}}}
    colour = {"type": "string", "format": "colour"}
    tools = [{"function": {"name": f"f{each}", "strict": True}} for each in range(3)]
    tools.append({"function": {"name": "g", "strict": True, "parameters": one_of}})
    of_tools = ChatOptions(tools=json.dumps(tools))
    of_tool = "tools[3].function.parameters"
    schema = OutputFormat("json_schema", "response_format.json_schema.schema", json.dumps(colour))
    grammar = OutputFormat("grammar", "guided_grammar", "start: nothing")
    for fields, param, problem in (
        ({"chat": of_tools}, of_tool, "oneOf constraints are not supported"),
        ({"chat": of_tools, "format": schema}, of_tool, "oneOf constraints are not supported"),
        ({"format": schema}, schema.param, "Unknown format: colour"),
        ({"format": grammar}, "guided_grammar", 'at 1(8): unknown name: "nothing"'),
    ):
        with subtests.test(param=param):
            for _ in range(2):  # the second is from the cache
                with pytest.raises(InvalidRequest) as refused:
                    await guides.guide_of(submitted(**fields), OutputStart.ANSWER)
                assert refused.value.param == param
                assert refused.value.message == f"{param}: it cannot be enforced: {problem}"
    format = OutputFormat("regex", "guided_regex", "a(?=b)")
    with pytest.raises(InvalidRequest) as refused:
        await guides.guide_of(submitted(format=format), OutputStart.ANSWER)
    assert refused.value.message.startswith("guided_regex: the grammar cannot be used: invalid reg")
    assert "|" not in refused.value.message


async def test_random_schemas_of_tools_are_held_as_their_texts_are_written(guides: Guides):
    """A tool for each of many schemas, all in one grammar, and a call of each."""
    random = np.random.default_rng(0)
    tools, texts = [], []
    for index in range(20):
        names = [f"{index}_{letter}" for letter in random.permutation([*"abcdef"])[:3]]
        kinds = random.choice(["integer", "string", "boolean"], 3)
        values = {"integer": -12, "string": 'a "quote"', "boolean": True}
        properties = {name: {"type": str(kind)} for name, kind in zip(names, kinds, strict=True)}
        parameters = {"type": "object", "properties": properties, "required": names}
        tools.append({"function": {"name": f"f{index}", "strict": True, "parameters": parameters}})
        arguments = {name: values[kind["type"]] for name, kind in properties.items()}
        texts.append(json.dumps({"name": f"f{index}", "arguments": arguments}))
    chat = ChatOptions(tools=json.dumps(tools))
    required = submitted(chat=chat, tool_choice=ToolChoice("required"))
    guide = await guides.guide_of(required, OutputStart.ANSWER)
    assert guide is not None
    for text in texts:
        call = f"<tool_call>\n{text}\n</tool_call>"
        assert vocabulary_with().refusal(guide.grammar, call) is None
        assert vocabulary_with().refusal(guide.grammar, call.replace('"f', '"g')) is not None

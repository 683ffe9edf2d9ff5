"""Tool calls are constrained in each family's format, with markers as tokens and as text."""

import json
import re
from typing import Any

import pytest

from services.tokenizer.guides.compose import Wanted, compose
from shared.dialects.known import KNOWN
from shared.errors import InvalidRequest
from shared.wire.messages import OutputFormat, OutputStart, ToolChoice
from tests.services.tokenizer.guides.conftest import Vocabulary, vocabulary_with

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["Celsius", "Fahrenheit"]}},
}
STRICT = {"name": "get_weather", "strict": True, "parameters": WEATHER}
FREE = {"name": "now", "description": "The time.", "parameters": {"type": "object"}}
TOOLS = json.dumps([{"type": "function", "function": each} for each in (STRICT, FREE)])
FREE_TOOLS = json.dumps([{"type": "function", "function": FREE}])
ROME = '{"city": "Rome", "unit": "Celsius"}'
FORMAT = OutputFormat(
    "json_schema", "response_format", '{"type": "object", "properties": {"q": {"type": "integer"}}}'
)
REQUIRED = ToolChoice("required")

DSML = (
    '<D|{0}>\n<D|invoke name="get_weather">\n'
    '<D|parameter name="city" string="true">Rome</D|parameter>\n'
    '<D|parameter name="days" string="false">3</D|parameter>\n'
    '<D|parameter name="unit" string="true">Celsius</D|parameter>\n</D|invoke>\n'
    '<D|invoke name="now">\n<D|parameter name="x" string="true">1</D|parameter>\n</D|invoke>\n'
    "</D|{0}>"
).replace("D|", "｜DSML｜")
# A text with two calls, in each format; in some the second is of the tool with free arguments.
TEXTS = {
    "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {"x": [1]}}\n</tool_call>',
    "ernie45": f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "llama3_json": f'{{"name": "get_weather", "parameters": {ROME}}}; '
    '{"name": "now", "parameters": {}}',
    "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nRo < me\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nCelsius\n</parameter>\n</function>\n"
    "</tool_call>\n<tool_call>\n<function=now>\n<parameter=zone>\na\nb\n</parameter>\n"
    "</function>\n</tool_call>",
    "mimo": "<tool_call><function=get_weather><parameter=city>Rome</parameter><parameter=unit>"
    "Celsius</parameter></function></tool_call><tool_call><function=now></function></tool_call>",
    "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
    "<arg_key>unit</arg_key>\n<arg_value>Celsius</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
    "glm47": "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
    "<arg_key>unit</arg_key><arg_value>Celsius</arg_value></tool_call><tool_call>now</tool_call>",
    "hy_v3": "<tool_calls>\n<tool_call>get_weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>"
    "Rome</arg_value>\n<arg_key>unit</arg_key>\n<arg_value>Celsius</arg_value>\n</tool_call>\n"
    "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
    "hy_v3_opensource": "<tool_calls:opensource>\n<tool_call:opensource>get_weather"
    "<tool_sep:opensource>\n<arg_key:opensource>city</arg_key:opensource>\n<arg_value:opensource>"
    "Rome</arg_value:opensource>\n<arg_key:opensource>unit</arg_key:opensource>\n"
    "<arg_value:opensource>Celsius</arg_value:opensource>\n</tool_call:opensource>\n"
    "<tool_call:opensource>now<tool_sep:opensource>\n</tool_call:opensource>\n"
    "</tool_calls:opensource>",
    "deepseek_v32": DSML.format("function_calls"),
    "deepseek_v4": DSML.format("tool_calls"),
    "minimax_m3": "<tool_call>\n"
    '<invoke name="get_weather"><city>Rome</city><days>3</days><unit>Celsius</unit></invoke>\n'
    '<invoke name="now"></invoke>\n</tool_call>'.replace("<", "]<]minimax[>[<"),
    "gemma4": '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:3,unit:<|"|>Celsius<|"|>}'
    '<tool_call|><|tool_call>call:now{a:{b:[<|"|>x<|"|>,true]}}<tool_call|>',
    "kimi_k3": '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Rome<|close|>argument<|sep|>'
    '<|open|>argument key="unit" type="string"<|sep|>Celsius<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="now" index="2"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>",
    "mistral": f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}, '
    '{"name": "now", "arguments": {}}]',
    "mistral_v11": f"[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]now[ARGS]{{}}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
    f"```json\n{ROME}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
    "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
    f"{ROME}<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{{}}<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{ROME}<|tool_call_end|><|tool_call_begin|>functions.now:1"
    "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {ROME}}},'
    ' {"name": "now", "arguments": {}}]',
    "nemotron_json": f'<TOOLCALL>[{{"name": "get_weather", "arguments": {ROME}}},'
    ' {"name": "now", "arguments": {}}]</TOOLCALL>',
    "cohere_command3": f'<|START_ACTION|>[{{"tool_name": "get_weather", "parameters": {ROME}}},'
    ' {"tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    "phi4_mini_json": f'functools[{{"name": "get_weather", "arguments": {ROME}}},'
    ' {"name": "now", "arguments": {}}]',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome'
    '</parameter>\n<parameter name="unit">Celsius</parameter>\n</invoke>\n<invoke name="now">\n'
    "</invoke>\n</minimax:tool_call>",
    "dots": '<dots_function_call>\n<invoke name="get_weather">\n<parameter name="city">Rome'
    '</parameter>\n<parameter name="unit">Celsius</parameter>\n</invoke>\n<invoke name="now">\n'
    "</invoke>\n</dots_function_call>",
    "internlm": f'<|action_start|><|plugin|>\n{{"name": "get_weather", "parameters": {ROME}}}\n'
    '<|action_end|>\n<|action_start|><|plugin|>\n{"name": "now", "parameters": {}}\n<|action_end|>',
    "seed_oss": "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n"
    "<parameter=unit>Celsius</parameter>\n</function>\n</seed:tool_call>\n<seed:tool_call>\n"
    "<function=now>\n</function>\n</seed:tool_call>",
    "pythonic": """[get_weather(city="Rome", unit="Celsius"), now(a=1, b=[True, {'x': None}])]""",
    "lfm2": '<|tool_call_start|>[get_weather(city="Rome", unit="Celsius"), now()]<|tool_call_end|>',
    "olmo3": '<function_calls>get_weather(city="Rome", unit="Celsius")\nnow()</function_calls>',
}
TOKEN = (
    r"<?｜\w+｜>?|<\|(\w+|\W)\|>|<\|\w+>|<\w+\|>|\[(TOOL_CALLS|ARGS)\]|</?(tool|arg)_\w+(:\w+)?>"
)
WITH_TOKENS = tuple(
    sorted(
        {
            marker
            for name in TEXTS
            for marker in (*KNOWN.tools[name].markers, *KNOWN.tools[name].tokens)
            if re.fullmatch(TOKEN, marker)
        }
    )
)


def grammar_of(vocabulary: Vocabulary, name: str, wanted: Wanted) -> str:
    guide = compose(vocabulary.dialect(name), wanted, OutputStart.ANSWER)
    assert guide is not None
    return guide.grammar


@pytest.fixture(scope="module", params=[(), WITH_TOKENS], ids=["text", "tokens"])
def marked(request: pytest.FixtureRequest) -> Vocabulary:
    return vocabulary_with(*request.param)


def test_every_format_has_a_text_here():
    names = {each.name for each in KNOWN.tools.values()}
    in_channels = {each.name for each in KNOWN.tools.values() if each.channels}
    assert TEXTS.keys() == names - in_channels


def test_required_calls_are_held_exactly(marked: Vocabulary, subtests: pytest.Subtests):
    for name, text in TEXTS.items():
        grammar = grammar_of(marked, name, Wanted(tools=TOOLS, choice=REQUIRED))
        with subtests.test(name):
            assert marked.refusal(grammar, text) is None
            assert marked.refusal(grammar, f"\n\n{text}") is None
            for wrong in (
                text.replace("Celsius", "Kelvin"),
                text.replace("now", "then"),
                f"Well, {text}",
                "",
            ):
                assert marked.refusal(grammar, wrong) is not None, wrong


def test_a_strict_tool_is_held_amid_free_text(marked: Vocabulary, subtests: pytest.Subtests):
    for name, text in TEXTS.items():
        grammar = grammar_of(marked, name, Wanted(tools=TOOLS))
        with subtests.test(name):
            assert marked.refusal(grammar, text) is None
            assert marked.refusal(grammar, "It < rains.\n") is None
            if not KNOWN.tools[name].is_tagless:
                assert marked.refusal(grammar, f"Well, {text}") is None
            for wrong in (text.replace("Celsius", "Kelvin"), text.replace("now", "then")):
                assert marked.refusal(grammar, wrong) is not None, wrong


def test_beside_a_format_calls_may_be_made_instead(marked: Vocabulary, subtests: pytest.Subtests):
    for name, text in TEXTS.items():
        grammar = grammar_of(marked, name, Wanted(FORMAT, TOOLS))
        format = KNOWN.tools[name]
        opening = (format.section_open or format.call_open) if format.is_tagless else ""
        with subtests.test(name):
            assert marked.refusal(grammar, '{"q": 1}') is None
            assert marked.refusal(grammar, opening + text) is None
            for wrong in ("well", opening + text.replace("Celsius", "Kelvin"), '{"q": "1"}'):
                assert marked.refusal(grammar, wrong) is not None, wrong


def test_one_call_alone_where_calls_are_not_parallel(marked: Vocabulary, subtests: pytest.Subtests):
    choice = ToolChoice("required", ["get_weather"], is_parallel=False)
    for name, text in TEXTS.items():
        grammar = grammar_of(marked, name, Wanted(tools=TOOLS, choice=choice))
        with subtests.test(name):
            assert marked.refusal(grammar, text) is not None
            assert marked.refusal(grammar, text.replace("now", "get_weather")) is not None
            assert "now" not in grammar


@pytest.mark.parametrize(
    "marked",
    [pytest.param((), id="text"), pytest.param(WITH_TOKENS, id="tokens", marks=pytest.mark.slow)],
    indirect=True,
)
def test_hundreds_of_tools_may_have_names_that_begin_alike(
    marked: Vocabulary, subtests: pytest.Subtests
):
    many = [{**FREE, "name": f"now_{index}"} for index in range(510)]
    tools = json.dumps([{"function": each} for each in (STRICT, FREE, *many)])
    for name, text in TEXTS.items():
        grammar = grammar_of(marked, name, Wanted(tools=tools, choice=REQUIRED))
        with subtests.test(name):
            assert marked.refusal(grammar, text) is None
            assert marked.refusal(grammar, text.replace("now", "now_50")) is None
            assert marked.refusal(grammar, text.replace("now", "now_")) is not None


def test_a_required_call_of_a_tool_that_is_not_strict_follows_its_schema_as_far_as_it_can_be_held(
    marked: Vocabulary, subtests: pytest.Subtests
):
    loose = WEATHER | {"properties": WEATHER["properties"] | {"x": {"not": {}}}}
    loose_tool = {"name": "get_weather", "parameters": loose}
    tools = json.dumps([{"function": loose_tool}, {"function": FREE}])
    for name, text in TEXTS.items():
        grammar = grammar_of(marked, name, Wanted(tools=tools, choice=REQUIRED))
        with subtests.test(name):
            assert marked.refusal(grammar, text) is None
            assert marked.refusal(grammar, text.replace("Celsius", "Kelvin")) is not None


def test_tools_that_are_not_strict_leave_the_text_free(vocabulary: Vocabulary):
    for choice in (None, ToolChoice("auto"), ToolChoice("none")):
        wanted = Wanted(tools=FREE_TOOLS, choice=choice)
        assert compose(vocabulary.dialect("hermes"), wanted, OutputStart.ANSWER) is None
    wanted = Wanted(tools=TOOLS, choice=ToolChoice("none"))
    assert compose(vocabulary.dialect("hermes"), wanted, OutputStart.ANSWER) is None


@pytest.mark.parametrize(
    ("name", "wanted", "param"),
    [
        ("", Wanted(tools=TOOLS, choice=REQUIRED), "tool_choice"),
        ("hermes", Wanted(tools=TOOLS, choice=ToolChoice("required", ["no"])), "tool_choice"),
        ("hermes", Wanted(tools='[{"function": {"name": "a b"}}]'), "tools[0].function.name"),
        ("hermes", Wanted(tools="[{}]"), "tools"),
        ("hermes", Wanted(tools=json.dumps([{"function": FREE}] * 513)), "tools"),
    ],
)
def test_uncallable_tools_are_refused(
    vocabulary: Vocabulary, name: str, wanted: Wanted, param: str
):
    with pytest.raises(InvalidRequest) as refused:
        compose(vocabulary.dialect(name), wanted, OutputStart.ANSWER)
    assert refused.value.param == param


def test_allowed_tools_may_be_called_and_no_others_though_none_is_strict(marked: Vocabulary):
    tools = json.dumps([{"function": {"name": name}} for name in ("now", "then")])
    wanted = Wanted(tools=tools, choice=ToolChoice("auto", ["now"]))
    grammar = grammar_of(marked, "hermes", wanted)
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert marked.refusal(grammar, call) is None
    assert marked.refusal(grammar, "It is noon.") is None
    assert marked.refusal(grammar, call.replace("now", "then")) is not None


def test_a_form_beside_required_calls_changes_nothing_but_is_checked(vocabulary: Vocabulary):
    dialect, answer = vocabulary.dialect("hermes"), OutputStart.ANSWER
    alone = compose(dialect, Wanted(tools=TOOLS, choice=REQUIRED), answer)
    assert alone == compose(dialect, Wanted(FORMAT, TOOLS, REQUIRED), answer)
    wrong = OutputFormat("json_schema", "response_format", '{"$ref": "#"}')
    with pytest.raises(InvalidRequest) as refused:
        compose(dialect, Wanted(wrong, TOOLS, REQUIRED), answer)
    assert refused.value.param == "response_format"

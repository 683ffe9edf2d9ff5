"""Formats read from a template, each by its unique features."""

import json
from pathlib import Path

import pytest

from shared.dialects.families.formats import FormatsOfFamilies
from shared.dialects.families.reasoning import REASONING_FORMATS
from shared.dialects.families.tools import TOOL_FORMATS

recognise = FormatsOfFamilies().recognise

EMBEDDED = Path(__file__).parents[3] / "models" / "shoal-tiny"
THINK = "{{ '<think>' ~ message.reasoning ~ '</think>' }}"
JSON_CALL = '{% if tools %}<tool_call>\n{"name": <name>, "arguments": <args>}\n</tool_call>'
CODER = r"'<tool_call>\n<function=f>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>'"
DEEPSEEK = "'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'"
ASSISTANT = "{% if not thinking %}'<｜Assistant｜></think>'"

TEMPLATES = [
    # template, tools, reasoning
    ("{{ messages }}", "", ""),
    ("{% for tool in tools %}{{ tool | tojson }}{% endfor %}", "hermes", ""),
    (JSON_CALL, "hermes", ""),
    (JSON_CALL + THINK, "hermes", "qwen3"),
    (JSON_CALL + THINK + "<response>\n", "ernie45", "ernie45"),
    (CODER, "qwen3_coder", ""),
    (CODER.replace(r"1>\n", "1>"), "mimo", ""),
    ("<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>" + THINK, "glm45", "glm45"),
    ("<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>" + THINK, "glm47", "glm45"),
    (
        DEEPSEEK + "'\\n' + '```json'" + "'<｜Assistant｜><think>\\n'</think>",
        "deepseek_v3",
        "deepseek_r1",
    ),
    (DEEPSEEK + ASSISTANT, "deepseek_v31", "deepseek_v3"),
    ("<|tool_call_begin|><|tool_call_argument_begin|>", "kimi_k2", ""),
    ("<|im_system|>tool_declare<|im_middle|>", "kimi_k2", ""),
    ("[TOOL_CALLS] [{{ calls }}]", "mistral", ""),
    ("[TOOL_CALLS]{{ name }}[ARGS]{{ args }}[THINK]", "mistral_v11", "mistral"),
    ("<minimax:tool_call>" + THINK + "<response>", "minimax_m2", "minimax_m2"),
    ("<seed:tool_call>\\n<function=f>\\n<parameter=p>'<seed:think>'", "seed_oss", "seed_oss"),
    (
        "<|start|>assistant to=self<|message|>{{ tools }}<atem:function_calls>\\n",
        "muse_glimmer",
        "muse_glimmer",
    ),
    ("<dots_function_call>\\n<invoke name=" + THINK, "dots", "qwen3"),
    ("<|action_start|><|plugin|>" + THINK, "internlm", "qwen3"),
    ("<function_calls></function_calls>", "olmo3", ""),
    ('functools[{"name"', "phi4_mini_json", ""),
    ("<|tool_call|>Here is my thought process:", "granite", "granite"),
    ("<|start|>assistant<|channel|>analysis<|message|>", "openai", "openai_gptoss"),
    ('<|python_tag|>{"name"', "llama3_json", ""),
    ('{"name": function name, "parameters": dictionary}', "llama3_json", ""),
    ("<|python_start|>[", "pythonic", ""),
    ("Use exact format: [func_name1(param1=value1)]", "pythonic", ""),
    ("<tool_call>name\n{% for k in args %}<arg_key>{{ k }}</arg_key>\n", "glm45", ""),
    ("<|tool_list_start|>[{{ tools }}", "lfm2", ""),
    ("'<|tool_call_start|>[' + name + '('" + THINK, "lfm2", "qwen3"),
    (
        '<|START_THINKING|><|START_RESPONSE|><|START_ACTION|>[{"tool_call_id": "0"',
        "cohere_command3",
        "cohere_command3",
    ),
    ("<|tool_call|>" + THINK + "<response></response>", "granite", "qwen3"),
    (
        "{{ tools }}<｜DSML｜function_calls>thinking<｜Assistant｜></think>",
        "deepseek_v32",
        "deepseek_v3",
    ),
    (
        "{{ tools }}<｜DSML｜tool_calls>thinking<｜Assistant｜></think>",
        "deepseek_v4",
        "deepseek_v3",
    ),
    ("{{ tools }}'<|open|>' + tag + '<|sep|>' '<|close|>'", "kimi_k3", "kimi_k3"),
    ("{{ tools }}<tool_calls><tool_call>f<tool_sep><arg_key>" + THINK, "hy_v3", "hy_v3"),
    ("{{ tools }}<|tool_call>call:' + name + '{' <|channel>thought\\n", "gemma4", "gemma4"),
    ("{{ tools }}<|content_thinking|><|content_invoke_tool_json|>", "inkling", "inkling"),
    (
        "{% set ns = ']<]minimax[>[' %}{{ tools }}{{ ns ~ '<tool_call>' }}<mm:think><response>",
        "minimax_m3",
        "minimax_m3",
    ),
    ("{{ tools }}<TOOLCALL>[{{ calls }}]</TOOLCALL>" + THINK, "nemotron_json", "qwen3"),
]
# Marks of unsupported formats, by their models.
UNKNOWN = {
    "Apertus": "<|tools_prefix|>[{{ call.name }}: {{ call.arguments }}]<|tools_suffix|>",
    "Apriel": "<tool_calls>[{{ call }}]</tool_calls> <tool_call>",
    "Functionary 3.1": '<function=f>{"a": 1}</function><|python_tag|>',
    "Functionary 3.2": "{% for call in message.tool_calls %}>>>{{ call.function.name }}",
    "FunctionGemma": "<start_function_call>call:",
    "GigaChat": "function call<|role_sep|>{{ message.function_call }}",
    "Granite 20B": "<function_call> {{ call }}",
    "MiniCPM5": '<function name="f"><param name="p">',
    "Solar": "<|tool_calls|>",
    "xLAM": "[{% for call in message.tool_calls %}{{ call | tojson }}{% endfor %}]",
}


def test_formats_are_read_from_the_template(subtests: pytest.Subtests):
    for template, tools, reasoning in TEMPLATES:
        with subtests.test(template=template):
            assert recognise(template, ()) == (tools, reasoning)


def test_a_form_that_is_none_of_ours_has_no_parser(subtests: pytest.Subtests):
    for model, form in UNKNOWN.items():
        with subtests.test(model):
            template = "{{ tools | tojson }}" + form
            assert recognise(template, ()) == ("", "")
            assert recognise(template.replace("\n", r"\n"), ()) == ("", "")


def test_a_template_that_teaches_no_form_is_told_by_the_vocabulary():
    template = "List of tools: {{ tools | tojson }} <tools> <tool_response>"
    assert recognise(template, ()) == ("hermes", "")
    assert recognise(template, {"<|tool_call_start|>"}) == ("lfm2", "")


def test_recognised_formats_are_known():
    for _, tools, reasoning in TEMPLATES:
        assert not tools or TOOL_FORMATS[tools].name == tools
        assert not reasoning or REASONING_FORMATS[reasoning].name == reasoning


def test_mistral_is_told_by_its_vocabulary():
    assert recognise("[TOOL_CALLS]", {"[ARGS]"}) == ("mistral_v11", "")


def test_the_markers_of_hy3_are_told_by_its_vocabulary():
    template = "{% set sep = '<tool_sep{}>'.format(suffix) %}"
    names = ("hy_v3_opensource", "hy_v3_opensource")
    assert recognise(template, {"<tool_call:opensource>", "<think:opensource>"}) == names


def test_the_embedded_model_calls_tools_as_hermes_does():
    config = json.loads((EMBEDDED / "tokenizer_config.json").read_text())
    assert recognise(config["chat_template"], ()) == ("hermes", "")

"""Missing, null and partial fields get the values templates expect.

Each small template does the same as the real model's in its name.
"""

from typing import Any

import pytest

from services.tokenizer.chat.prompt import readable_tools
from tests.services.tokenizer.chat.samples import GLM, LLAMA, PARTS, QWEN, options
from tests.services.tokenizer.chat.test_prompt import prompt

CALLS = "{% for c in m.tool_calls or [] %}[{{ c.type }} {{ c.function.name }}]{% endfor %}"
LOOP = "{% for m in messages %}%s" + CALLS + "\n{% endfor %}"


def each(body: str) -> str:
    """A template that writes ``body`` for each message ``m``."""
    return LOOP.replace("%s", body)


TEMPLATES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "glm": GLM,
    "parts alone": PARTS,
    "adds": each("{{ m.role + ': ' + m.content }}"),
    "joins": each("{{ m['role'] ~ m['content'] }}"),
    "searches": each("{% if '</think>' in m.content %}{% endif %}{{ m.content }}"),
    "splits": each("{{ m.content.split('</think>')[-1] }}"),
    "counts": each("{% if m.content | length %}{{ m.content }}{% endif %}"),
    "writes json": each("{{ m.content | tojson }}"),
    "goes through parts": each(
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    ),
    "goes through parts or fails": each(
        "{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ raise_exception('content') }}{% endif %}"
    ),
    "goes through calls in the content": each(
        "{% set calls = m.content %}{% if m.role == 'x' %}{% for c in calls %}{% endfor %}"
        "{% endif %}{{ m.role + m.content }}"
    ),
    "writes parts raw": each(
        "{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}"
    ),
    "wants null": each("{% if m.content is none %}calls{% else %}{{ m.content + '' }}{% endif %}"),
    "takes null for nothing": each(
        "{% if m.content is none or m.content == '' %}{% else %}{{ m.content + '' }}{% endif %}"
        "{{ m.content | length }}"
    ),
}
FUNCTION: dict[str, Any] = {"name": "now", "arguments": "{}"}
CALL: dict[str, Any] = {"id": "c1", "type": "function", "function": FUNCTION}


def chat(assistant: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", **assistant},
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_without_a_text_goes_back_to_every_template(name: str):
    """Our own replies have null next to calls."""
    prompts = {
        prompt(TEMPLATES[name], chat({**content, "tool_calls": [call]}))
        for content in ({"content": None}, {"content": ""}, {})
        for call in (CALL, {"id": "c1", "function": {"name": "now", "arguments": None}})
    }
    (text,) = prompts
    assert "None" not in text
    assert "null" not in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_is_the_same_as_one_part_of_it(name: str):
    texts = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "Bye"},
    ]
    parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in texts
    ]
    assert prompt(TEMPLATES[name], parts) == prompt(TEMPLATES[name], texts)


def test_half_a_character_in_arguments_or_in_a_template_is_a_replacement_character():
    """A model's or client's text was cut; its conversation continues."""
    call = {"function": {"name": "f", "arguments": r'{"\ud83d": ["\\ud83d", "\ude00"]}'}}
    body = "{{ m.tool_calls[0].function.arguments | tojson(ensure_ascii=%s) if m.tool_calls }}"
    messages = chat({"tool_calls": [{"id": "c1", **call}]})
    assert '{"\ufffd": ["\\\\ud83d", "\ufffd"]}' in prompt(each(body % "false"), messages)
    assert "ud83d" not in prompt(each(body % "true"), messages).replace("\\\\ud83d", "")
    assert prompt(r"{{ '\ud83d' }}", messages) == "\ufffd"


def tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "now", **fields}}


EMPTY = {"description": "", "parameters": {"type": "object", "properties": {}}}


@pytest.mark.parametrize(
    "body",
    [
        "{{ f.name + f.description }}{{ f.parameters | tojson | length > 1 }}",
        "{{ f.description ~ '' }}{% for n, p in f.parameters.properties | items %}{% endfor %}",
        "{{ f.description | upper }}{% if 'x' in f.parameters.properties %}{% endif %}",
        "{{ f['description'].strip() }}{{ f['parameters']['properties'].items() | list }}",
    ],
)
def test_a_tool_may_omit_keys_that_a_template_expects(body: str):
    source = "{% for t in tools or [] %}{% set f = t.function %}" + body + "{% endfor %}"
    hello = [{"role": "user", "content": "hi"}]
    bare = (
        tool(),
        tool(description=None, parameters=None, strict=None),
        tool(description=None, parameters={"type": "object"}),
        tool(parameters={"type": "object", "properties": None, "required": None}),
    )
    prompts = {prompt(source, hello, options(tools=[each])) for each in bare}
    assert prompts == {prompt(source, hello, options(tools=[tool(**EMPTY)]))}


def test_keys_that_a_template_tests_for_stay_missing():
    source = (
        "{% for t in tools %}{{ t | tojson }}"
        "{% if t.function.description is defined %}d{% endif %}"
        "{% if t.function.parameters %}{{ t.function.parameters.properties }}{% endif %}"
        "{% endfor %}"
    )
    written = prompt(source, [{"role": "user", "content": "hi"}], options(tools=[tool()]))
    assert written == '{"type": "function", "function": {"name": "now"}}'


def test_nulls_that_say_something_stay():
    city = {"type": None, "enum": ["a", None], "default": None, "const": None, "description": None}
    schema = {"properties": {"description": city, "type": {"anyOf": [{"title": None}]}}}
    (found,) = readable_tools([tool(parameters=schema)], ())
    assert found["function"]["parameters"]["properties"] == {
        "description": {"enum": ["a", None], "default": None, "const": None},
        "type": {"anyOf": [{}]},
    }

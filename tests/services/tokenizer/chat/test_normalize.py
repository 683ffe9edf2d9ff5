"""Messages of clients, in the form templates read."""

import re
from typing import Any

import pytest
from jinja2 import Environment

from services.tokenizer.chat.normalize import normalize
from services.tokenizer.chat.template_traits import TemplateTraits, traits_of
from shared.errors import InvalidRequest
from tests.services.tokenizer.chat.samples import CALL, DEEPSEEK, GLM, LLAMA, PARTS, QWEN

PARTS_OF_TEXT = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def test_traits_are_read_from_the_template(subtests: pytest.Subtests):
    for source, traits in (
        (QWEN, TemplateTraits()),
        (LLAMA, TemplateTraits(knows_developer=True)),
        (GLM, TemplateTraits(takes_parts=True)),
        (DEEPSEEK, TemplateTraits(joins_arguments=True, wants_null=True)),
        (PARTS, TemplateTraits(takes_parts=True, takes_parts_alone=True)),
        ("made by a developer", TemplateTraits()),
        ("{% for line in m.content.split('x') %}{% endfor %}", TemplateTraits()),
        (
            "{% set c = m['content'] %}{% if c is not string %}{% for p in c[1:] | list %}"
            "{% endfor %}{% endif %}",
            TemplateTraits(takes_parts=True),
        ),
        (
            "{% for p in m.content %}{% endfor %}{{ 'user: ' + m.content }}",
            TemplateTraits(),
        ),
        (
            "{% set c = m.content %}{% for p in c %}{% endfor %}{{ c ~ 'x' if c is string }}",
            TemplateTraits(takes_parts=True),
        ),
        ("{% if m.content is none %}{% endif %}", TemplateTraits(wants_null=True)),
        ("{% if m.content is none or m.content == '' %}{% endif %}", TemplateTraits()),
        (
            "{{ t.description + '' }}{% if t.parameters is defined %}{{ t.parameters }}{% endif %}"
            "{{ t.parameters | default({}) }}{{ 'properties' in p and p.properties | items }}",
            TemplateTraits(takes_for_granted=frozenset({"description"})),
        ),
        ("{{ call.arguments | tojson }}{{ '' + call.arguments }}", TemplateTraits()),
        (
            "{% if call.arguments is defined %}{{ call.arguments }}{% endif %}",
            TemplateTraits(joins_arguments=True),
        ),
    ):
        with subtests.test(source=source[:50]):
            assert traits_of(Environment(extensions=[]).parse(plain(source))) == traits


def plain(source: str) -> str:
    """Without the tags of extensions."""
    for tag in ("{% generation %}", "{% endgeneration %}", "{% continue %}"):
        source = source.replace(tag, "")
    return source


def call_with(arguments: Any) -> dict[str, Any]:
    return {**CALL, "function": {**CALL["function"], "arguments": arguments}}


def test_messages_have_the_form_that_templates_expect(subtests: pytest.Subtests):
    plain, parts = TemplateTraits(), TemplateTraits(takes_parts=True)
    joins = TemplateTraits(joins_arguments=True)
    null = TemplateTraits(wants_null=True)
    user, assistant, tool = (
        {"role": role, "content": ""} for role in ("user", "assistant", "tool")
    )
    message: Any
    for message, traits, expected in (
        ({**user, "role": "developer"}, plain, {**user, "role": "system"}),
        (
            {**user, "role": "developer"},
            TemplateTraits(knows_developer=True),
            {**user, "role": "developer"},
        ),
        ({**user, "content": PARTS_OF_TEXT}, plain, {**user, "content": "ab"}),
        ({**user, "content": PARTS_OF_TEXT}, parts, {**user, "content": PARTS_OF_TEXT}),
        ({**tool, "content": PARTS_OF_TEXT}, parts, {**tool, "content": "ab"}),
        (
            {**assistant, "content": None, "tool_calls": [], "name": None},
            plain,
            {**assistant, "content": ""},
        ),
        *(
            (
                {**message, "tool_calls": [call_with({})]},
                traits,
                {**assistant, "content": expected, "tool_calls": [call_with({})]},
            )
            for message in (assistant, {**assistant, "content": None}, {"role": "assistant"})
            for traits, expected in (
                (plain, ""),
                (null, None),
                (TemplateTraits(takes_parts_alone=True), [{"type": "text", "text": ""}]),
            )
        ),
        ({**assistant, "content": None}, null, assistant),
        (
            {**assistant, "tool_calls": [{"function": {"name": "f"}}]},
            plain,
            {
                **assistant,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}],
            },
        ),
        (
            {**assistant, "reasoning": "so"},
            plain,
            {**assistant, "reasoning": "so", "reasoning_content": "so"},
        ),
        (
            {**assistant, "reasoning_content": "so"},
            plain,
            {**assistant, "reasoning": "so", "reasoning_content": "so"},
        ),
        ({**tool, "tool_call_id": "1"}, plain, {**tool, "tool_call_id": "1"}),
        *(
            (
                {**assistant, "tool_calls": [call_with(given)]},
                traits,
                {**assistant, "tool_calls": [call_with(found)]},
            )
            for given, traits, found in (
                ('{"a": [1, 2.5, "ü"]}', plain, {"a": [1, 2.5, "ü"]}),
                ({"a": 1}, plain, {"a": 1}),
                ("", plain, {}),
                (None, plain, {}),
                ('{"a": ', plain, {}),
                ("[1]", plain, {}),
                ("[" * 100_000, plain, {}),
                ('{"a":1}', joins, '{"a":1}'),
                ({"a": "ü"}, joins, '{"a": "ü"}'),
            )
        ),
    ):
        with subtests.test(message=str(message)[:100]):
            assert normalize([message], traits) == [expected]


def test_calls_of_functions_are_calls_of_tools():
    """OpenAI's deprecated form; two calls, and the result of each."""
    messages: list[dict[str, Any]] = []
    for name in ("now", "then"):
        called = {"name": name, "arguments": '{"a": 1}'}
        messages += [
            {"role": "assistant", "content": None, "function_call": called, "tool_calls": None},
            {"role": "function", "name": name, "content": "noon"},
        ]
    found = normalize(messages, TemplateTraits())
    for name, (call, result) in zip(("now", "then"), (found[:2], found[2:]), strict=True):
        (tool_call,) = call["tool_calls"]
        assert tool_call["function"] == {"name": name, "arguments": {"a": 1}}
        assert "function_call" not in call
        assert result["role"] == "tool"
        assert result["name"] == name
        assert result["tool_call_id"] == tool_call["id"]
        assert re.fullmatch(r"[a-zA-Z0-9]{9}", tool_call["id"])
    assert found[1]["tool_call_id"] != found[3]["tool_call_id"]
    both = [{**messages[0], "tool_calls": [{**CALL, "id": "of its own"}]}, messages[1]]
    call, result = normalize(both, TemplateTraits())
    assert [each["id"] for each in call["tool_calls"]] == ["of its own"]
    assert result["tool_call_id"] == "of its own"
    with pytest.raises(InvalidRequest) as refused:
        normalize([{"role": "assistant", "function_call": "now"}], TemplateTraits())
    assert refused.value.param == "messages[0].function_call"


def test_arguments_that_are_no_object_are_logged_by_place(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    normalize([{"role": "assistant", "tool_calls": [call_with("oops")]}], TemplateTraits())
    assert "messages[0].tool_calls[0].function.arguments" in caplog.text
    assert "oops" not in caplog.text


@pytest.mark.parametrize("role", ["user", "tool", "assistant"])
def test_images_are_parts_for_templates_that_take_parts(role: str):
    parts = [{"type": "image", "media": 0}, {"type": "refusal", "refusal": "no"}]
    traits = TemplateTraits(takes_parts=True)
    (found,) = normalize([{"role": role, "content": parts}], traits)
    assert found["content"] == [{"type": "image"}, {"type": "text", "text": "no"}]
    with pytest.raises(InvalidRequest, match="the chat template takes no images") as caught:
        normalize([{"role": role, "content": parts}], TemplateTraits())
    assert caught.value.param == "messages[0].content[0]"

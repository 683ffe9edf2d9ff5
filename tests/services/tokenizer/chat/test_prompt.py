"""The text of a chat equals transformers'."""

import copy
import json
from typing import Any

import pytest

from services.tokenizer.chat import bounded
from services.tokenizer.chat.prompt import render_prompt
from services.tokenizer.chat.template import TooMuchText
from services.tokenizer.chat.template_options import check_defaults
from services.tokenizer.chat.templates import ChatTemplates
from shared.errors import ConfigError, InvalidRequest
from shared.wire.messages import ChatOptions
from tests.services.tokenizer.chat.samples import (
    CALL,
    CONVERSATION,
    GLM,
    LLAMA,
    PARTS,
    QWEN,
    SPECIAL_TOKENS,
    TEMPLATES,
    TOOLS,
    options,
)

DOCUMENTS = [{"title": "Fisch", "text": "schwimmt"}]
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def prompt(
    source: str | dict[str, str],
    messages: list[dict[str, Any]],
    chosen: ChatOptions | None = None,
    max_chars: int = 10_000,
    trusts_requests: bool = False,
    defaults: dict[str, Any] | None = None,
) -> str:
    sources = source if isinstance(source, dict) else {"default": source}
    templates, chosen = ChatTemplates(sources, trusts_requests), chosen or ChatOptions()
    return render_prompt(templates, SPECIAL_TOKENS, messages, chosen, max_chars, defaults or {})


def refusal(*arguments: Any, **more: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as raised:
        prompt(*arguments, **more)
    return raised.value


def nested(num_levels: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(num_levels):
        found = [found]
    return found


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": nested(5000)}]},
        {"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": nested(5000)}}}]},
    ],
)
def test_a_message_nested_more_deeply_than_the_stack_is_refused(message: dict[str, Any]):
    source = "{{ messages[0].tool_calls[0].function.arguments + '' }}"
    error = refusal(source, [message])
    assert (error.param, error.message) == ("messages", "messages are nested too deeply")


def test_a_setting_gives_variables_that_a_request_leaves_out():
    source = "{{ enable_thinking }} {{ effort }}"
    defaults = {"enable_thinking": False, "effort": "low"}
    assert prompt(source, HELLO, defaults=defaults) == "False low"
    asked = ChatOptions(template_kwargs='{"effort": "high"}')
    assert prompt(source, HELLO, asked, defaults=defaults) == "False high"


def test_a_setting_gives_no_variable_of_ours():
    with pytest.raises(ConfigError, match=r"^default-chat-template-kwargs: tools is set by Shoal$"):
        check_defaults({"tools": []}, SPECIAL_TOKENS)


def test_messages_that_keep_a_template_busy_are_refused_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounded, "MAX_RENDER_S", 0.1)
    quadratic = (
        "{% for a in messages %}{% for b in messages %}"
        "{% if a.content in b.content %}{% endif %}{% endfor %}{% endfor %}ok"
    )
    error = refusal(quadratic, HELLO * 4096)
    assert (error.status, error.param, error.code) == (400, "messages", "chat_template_too_slow")
    assert "0.1 s of the processor's time" in error.message
    assert prompt(quadratic, HELLO * 10) == "ok"
    brought = ChatOptions(template=quadratic)
    error = refusal(QWEN, HELLO * 4096, brought, trusts_requests=True)
    assert (error.param, error.code) == ("chat_template", "chat_template_too_slow")


def rendered_by_transformers(
    source: str, messages: list[dict[str, Any]], tools: Any = None, **variables: Any
) -> str:
    from transformers.utils import chat_template_utils

    render: Any = chat_template_utils.render_jinja_template
    texts, _ = render([messages], tools=tools, chat_template=source, **SPECIAL_TOKENS, **variables)
    return str(texts[0])


def as_templates_read_them(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return messages


@pytest.mark.seconds
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_matches_the_rendering_of_transformers(name: str, subtests: pytest.Subtests):
    source = TEMPLATES[name]
    messages = CONVERSATION if name != "deepseek" else [CONVERSATION[0], *CONVERSATION[3:]]
    kwargs = {"enable_thinking": False, "date_string": "1 Jan 2030"}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"add_generation_prompt": True}),
        ({"tools": TOOLS}, {"tools": TOOLS, "add_generation_prompt": True}),
        ({"adds_generation_prompt": False}, {}),
        ({"template_kwargs": kwargs}, {**kwargs, "add_generation_prompt": True}),
        ({"documents": DOCUMENTS}, {"documents": DOCUMENTS, "add_generation_prompt": True}),
        (
            {"adds_generation_prompt": False, "continues_final_message": True},
            {"continue_final_message": True},
        ),
    ]
    for ours, theirs in cases:
        with subtests.test(**ours):
            expected = rendered_by_transformers(source, as_templates_read_them(messages), **theirs)
            assert prompt(source, messages, options(**ours)) == expected


def test_the_text_of_the_last_message_is_where_the_prompt_ends(subtests: pytest.Subtests):
    chosen = options(adds_generation_prompt=False, continues_final_message=True)
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two. "}]
    for source, content, end in (
        (QWEN, "The answer is ", "<|im_start|>assistant\nThe answer is "),
        (LLAMA, "The answer is ", "\n\nThe answer is"),  # its strip is reproduced
        (QWEN, parts, "<|im_start|>assistant\nOne.Two. "),
        (GLM, parts, "<|assistant|>\nOne.Two. "),
        (QWEN, "", "<|im_start|>assistant\n"),
    ):
        with subtests.test(content=content):
            messages = [*HELLO, {"role": "assistant", "content": content}]
            assert prompt(source, messages, chosen).endswith(end)
            assert messages[-1]["content"] == content


def test_a_prompt_that_can_continue_nothing_is_refused(subtests: pytest.Subtests):
    chosen = options(adds_generation_prompt=False, continues_final_message=True)
    for source, content in ((QWEN, None), (GLM, []), ("{{ messages[0].content }}", "left out")):
        with subtests.test(content=content):
            messages = [*HELLO, {"role": "assistant", "content": content}]
            assert refusal(source, messages, chosen).param == "continue_final_message"
    both = refusal(QWEN, HELLO, options(continues_final_message=True))
    assert (both.param, "both true" in both.message) == ("continue_final_message", True)


def test_the_template_for_tools_is_taken_with_tools():
    sources = {"default": "plain", "tool_use": "{{ tools | length }} tools", "rag": "rag"}
    assert prompt(sources, HELLO) == "plain"
    assert prompt(sources, HELLO, options(tools=[])) == "plain"
    assert prompt(sources, HELLO, options(tools=TOOLS)) == "1 tools"
    assert prompt({"default": "{{ tools is none }}"}, HELLO) == "True"


def test_errors_name_the_clients_field(subtests: pytest.Subtests):
    bad = {"a call": {**CALL, "function": None}, "a part": [{"type": "image_url"}]}
    for param, messages, chosen in (
        ("messages", HELLO, options(template_kwargs={"fails": True})),
        ("messages[0].content", [{"role": "user", "content": 7}], ChatOptions()),
        (
            "messages[0].content[0].type",
            [{"role": "user", "content": bad["a part"]}],
            ChatOptions(),
        ),
        (
            "messages[0].tool_calls[0].function",
            [{"role": "assistant", "tool_calls": [bad["a call"]]}],
            ChatOptions(),
        ),
        ("tools", HELLO, options(tools="no array")),
        ("tools", HELLO, ChatOptions(tools='[{"a":' + "[" * 900 + "]" * 900 + "}]")),
        ("documents", HELLO, options(documents=[1])),
        ("chat_template_kwargs", HELLO, options(template_kwargs=[])),
        ("chat_template_kwargs", HELLO, ChatOptions(template_kwargs="{")),
        ("chat_template_kwargs.messages", HELLO, options(template_kwargs={"messages": []})),
        ("chat_template_kwargs.tokenize", HELLO, options(template_kwargs={"tokenize": True})),
        ("chat_template_kwargs.bos_token", HELLO, options(template_kwargs={"bos_token": ""})),
    ):
        with subtests.test(param=param):
            source = "{% if fails %}{{ raise_exception('no') }}{% endif %}"
            assert refusal(source, messages, chosen).param == param


def test_a_template_of_a_request_is_taken_where_requests_are_trusted(subtests: pytest.Subtests):
    brought = options(template="{{ messages[0].content }}!")
    assert prompt(QWEN, HELLO, brought, trusts_requests=True) == "hi!"
    assert "trust-request-chat-template" in refusal(QWEN, HELLO, brought).message
    for template in ("{% if %}", "x" * (64 << 10) + "x", "{{ 1 / 0 }}", "{{ ''.__class__.mro() }}"):
        with subtests.test(template=template[:20]):
            error = refusal(QWEN, HELLO, options(template=template), trusts_requests=True)
            assert error.param == "chat_template"


def test_only_the_last_templates_of_requests_stay_compiled():
    templates = ChatTemplates({}, trusts_requests=True)
    first = templates.find("0", has_tools=False)
    assert templates.find("0", has_tools=False) is first
    for number in range(100):
        templates.find(str(number), has_tools=False)
    assert len(templates._brought) == 32
    assert templates.find("0", has_tools=False) is not first


def test_a_template_that_writes_without_end_is_cut_off():
    endless = "{% for i in range(100000) %}{% for j in range(100000) %}x{% endfor %}{% endfor %}"
    with pytest.raises(TooMuchText, match="more than 1000"):
        prompt(endless, HELLO, max_chars=1000)


def test_parts_of_a_message_are_joined_unless_the_template_goes_through_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts}]
    assert "ab<|im_end|>" in prompt(QWEN, messages)
    assert prompt(PARTS, messages) == "<|user|>(a)(b)<|assistant|>"
    assert prompt(PARTS, HELLO) == "<|user|>(hi)<|assistant|>"


def test_templates_of_requests_may_have_published_texts_of_images_too():
    """As the model's own."""
    templates = ChatTemplates({"default": "<image>{{ messages[0].content }}"}, trusts_requests=True)
    templates.replace("<image>", "<IMG>")
    for source in ("", "<image>:"):
        assert templates.find(source, has_tools=False).source.startswith("<IMG>")

import pytest

from services.tokenizer.template import ChatTemplate
from shared.errors import ConfigError, InvalidRequest

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_messages_become_the_prompt_of_the_assistant():
    template = ChatTemplate(CHATML, {})
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_and_the_functions_of_hugging_face_are_there():
    source = "{{ bos_token }}{{ messages | tojson }}{{ strftime_now('%%') }}"
    assert ChatTemplate(source, {"bos_token": "<s>"}).render([{"a": "é"}]) == '<s>[{"a": "é"}]%'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.missing }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str):
    with pytest.raises(InvalidRequest, match="chat template"):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str):
    with pytest.raises(InvalidRequest):
        ChatTemplate(source, {}).render([{"role": "user", "content": "hi"}])


def test_a_template_that_does_not_compile_is_a_wrong_model():
    with pytest.raises(ConfigError, match="compile"):
        ChatTemplate("{% if %}", {})

import pytest

from services.tokenizer.chat.template import TEMPLATE_ERRORS, ChatTemplate
from services.tokenizer.chat.templates import ChatTemplates
from shared.errors import ConfigError


def rendered(source: str, **variables: object) -> str:
    return ChatTemplate(source).render({"messages": [{"role": "user"}], **variables}, 1000)


def test_the_functions_of_hugging_face_are_there(subtests: pytest.Subtests):
    for source, expected in (
        ("{{ x | tojson }}", '{"b": "é<", "a": [1, 2]}'),
        ("{{ x | tojson(sort_keys=True, separators=(',', ':')) }}", '{"a":[1,2],"b":"é<"}'),
        ("{{ x.b | tojson(ensure_ascii=True) }}", '"\\u00e9<"'),
        ("{{ x.a | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("a{% generation %}b{{ x.a[0] }}{% endgeneration %}c", "ab1c"),
        ("{% for i in x.a %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
    ):
        with subtests.test(source=source):
            assert rendered(source, x={"b": "é<", "a": [1, 2]}) == expected


def test_a_template_that_fails_raises_what_callers_expect(subtests: pytest.Subtests):
    for source in (
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.missing.missing }}",
        "{{ messages + 1 }}",
        "{{ 1 / 0 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ):
        with subtests.test(source=source), pytest.raises(TEMPLATE_ERRORS):
            rendered(source)


@pytest.mark.parametrize("source", ["{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str):
    with pytest.raises(TEMPLATE_ERRORS):
        rendered(source)


def test_a_template_that_does_not_compile_is_a_wrong_model():
    with pytest.raises(ConfigError, match="compile"):
        ChatTemplates({"default": "{% if %}"}, trusts_requests=False)

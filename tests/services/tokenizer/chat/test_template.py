import pytest

from services.tokenizer.chat import bounded
from services.tokenizer.chat.bounded import TooMuchTime
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


def test_a_failing_template_raises_the_expected_error(subtests: pytest.Subtests):
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


ROUNDS = (
    "{% for a in xs %}{% for b in xs %}{% for c in xs %}BODY{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(
    "source",
    [
        "{% set a = 9 ** 256 %}" + "{% set a = a * a %}" * 25,
        "{{ []|slice(10 ** 12)|map('length')|sum }}",
        "{{ []|slice(1000000000000)|sum }}",
        "{{ [1]|batch(10 ** 12, 0)|sum }}",
    ],
)
def test_a_template_makes_no_huge_value_of_a_small_one(source: str):
    with pytest.raises(TEMPLATE_ERRORS):
        rendered(source)


def test_a_template_divides_lists_and_multiplies():
    assert rendered("{{ [1, 2, 3]|slice(2)|list }}{{ [1, 2, 3]|batch(2)|list }}{{ 3 * 4 }}") == (
        "[[1, 2], [3]][[1, 2], [3]]12"
    )


def test_a_template_that_would_take_for_ever_ends(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(bounded, "MAX_RENDER_S", 0.05)
    begin = "{% set xs = range(90000) | list %}"
    for source in (
        begin + ROUNDS.replace("BODY", ""),
        begin + ROUNDS.replace("BODY", "{% continue %}"),
        begin + "{% for a in xs %}{% for b in xs if false %}x{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) + f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% set xs = range(300) %}{% for a in xs recursive %}{% if loop.depth < 9 %}{{ loop(xs) }}"
        "{% endif %}{% endfor %}",
        begin + "{% set ns = namespace(t='') %}{% for a in xs %}{% for b in xs %}"
        "{% set ns.t = ns.t + 'some words' %}{% endfor %}{% endfor %}",
        "{% set tick = 1 %}" + begin + ROUNDS.replace("BODY", "{% set range = 1 %}"),
    ):
        with subtests.test(source=source), pytest.raises(TooMuchTime, match="processor's time"):
            rendered(source)
    assert rendered(
        "{% for a in range(3) if a %}{{ loop.index }}{{ loop.length }}{% endfor %}"
    ) == ("1222")


def test_operators_make_no_large_values_of_small_ones(subtests: pytest.Subtests):
    for source in ("{{ 9 ** 9 ** 9 }}", "{{ 'x' * 2 ** 40 }}", "{{ 10 ** 9 * [1, 2] }}"):
        with subtests.test(source=source), pytest.raises(TEMPLATE_ERRORS):
            rendered(source)
    assert rendered("{{ 2 ** 10 }}{{ 'ab' * 3 }}{{ 3 * 4 }}{{ (2 * [1]) | length }}") == (
        "1024ababab122"
    )


def test_a_template_takes_its_time_anew_with_each_rendering(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bounded, "MAX_RENDER_S", 0.5)
    template = ChatTemplate("{% for a in range(90000) %}{% endfor %}ok")
    for _ in range(12):
        assert template.render({}, 10) == "ok"

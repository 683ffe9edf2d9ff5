"""Grammars of formats accept exactly the right texts."""

import json

import pytest

from services.tokenizer.guides.compose import Wanted, compose
from shared.wire.messages import FormatKind, OutputFormat, OutputStart
from tests.services.tokenizer.guides.conftest import Vocabulary

PERSON = {
    "type": "object",
    "title": "Person",
    "properties": {
        "name": {"type": "string", "description": "as in the passport", "default": ""},
        "age": {"type": "integer", "minimum": 0},
        "title": {"enum": ["Dr", "Prof"]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON_IN_GBNF = r"""
root   ::= object   # a comment
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUM_IN_LARK = 'start: NUMBER ("+" NUMBER)*\nNUMBER: /[0-9]+/'

# kind, value, accepted texts, refused texts
CASES: list[tuple[FormatKind, str, list[str], list[str]]] = [
    (
        "json_object",
        "",
        ['{"a": [1, {"b": null}]}', "{}", '{\n  "a": 1\n}'],
        ["[]", "1", "{} and more", '{"a": 1', "\n{}"],
    ),
    (
        "json_schema",
        json.dumps(PERSON),
        [
            '{"name": "Ada", "age": 36}',
            '{"name":"Ada","age":36,"title":"Dr"}',
            '{\n  "name": "Ada",\n  "age": 36\n}',
        ],
        [
            '{"age": 36, "name": "Ada"}',
            '{"name": "Ada"}',
            '{"name": "Ada", "age": -1}',
            '{"name": "Ada", "age": 36, "title": "Mr"}',
            '{"name": "Ada", "age": 36, "more": 1}',
            '{"name":   "Ada", "age": 36}',
        ],
    ),
    ("regex", r"\d{2}/[a-c]+", ["12/abc"], ["1/a", "12/d", "12/a "]),
    ("regex", "a|\n", ["a", "\n"], ["ab"]),
    ("choice", '["yes", "yes, but", "no\\"!"]', ["yes", "yes, but", 'no"!'], ["ye", "no", "yesno"]),
    ("grammar", SUM_IN_LARK, ["1+22+3", "7"], ["1+", "+1", "a"]),
    ("grammar", JSON_IN_GBNF, ['{"a": [1, -2.5, "x\\n", true]}'], ['{"a": [1}', "[1]"]),
    (
        "grammar",
        'root ::= ("yes" | "no") tail-x{2}\ntail-x ::= [^a-z"\\]\\-] | "\\u00e9"',
        ["yesA1", "noé!"],
        ["yesab", "no]]", "yes--", 'yes""'],
    ),
]


def grammar_of(vocabulary: Vocabulary, format: OutputFormat, **options) -> str:
    start = options.pop("start", OutputStart.ANSWER)
    guide = compose(vocabulary.dialect(**options), Wanted(format), start)
    assert guide is not None
    return guide.grammar


def test_texts_of_a_format_are_taken_and_others_refused(vocabulary: Vocabulary, subtests):
    for kind, value, taken, refused in CASES:
        grammar = grammar_of(vocabulary, OutputFormat(kind, "response_format", value))
        for text in taken:
            with subtests.test(kind=kind, taken=text):
                assert vocabulary.refusal(grammar, text) is None
        for text in refused:
            with subtests.test(kind=kind, refused=text):
                assert vocabulary.refusal(grammar, text) is not None


def test_the_client_decides_on_whitespace_of_json(vocabulary: Vocabulary):
    value = json.dumps(PERSON)
    compact = grammar_of(
        vocabulary, OutputFormat("json_schema", "guided_json", value, whitespace="()")
    )
    assert vocabulary.refusal(compact, '{"name":"Ada","age":36}') is None
    assert vocabulary.refusal(compact, '{"name": "Ada","age":36}') is not None
    assert vocabulary.refusal(compact, ' {"name":"Ada","age":36}') is not None


def test_objects_have_no_other_properties_unless_a_schema_says_so(
    vocabulary: Vocabulary, subtests: pytest.Subtests
):
    one, two = ({"type": "object", "properties": {name: {"type": "integer"}}} for name in "ab")
    for schema, has_others in (
        (one, False),
        ({"anyOf": [one, two]}, False),
        (one | {"additionalProperties": True}, True),
        ({"type": "object", "allOf": [one, two]}, True),
        (one | {"anyOf": [{"type": "object", "required": ["a"]}]}, True),
        ({"$ref": "#/$defs/one", "properties": {}, "$defs": {"one": one}}, True),
    ):
        grammar = grammar_of(
            vocabulary, OutputFormat("json_schema", "response_format", json.dumps(schema))
        )
        with subtests.test(schema=str(schema)):
            assert vocabulary.refusal(grammar, '{"a": 1}') is None
            assert (vocabulary.refusal(grammar, '{"a": 1, "b": 2}') is None) == has_others


def test_a_loose_schema_may_have_uncheckable_keywords(vocabulary: Vocabulary):
    value = json.dumps({"oneOf": [{"type": "integer"}, {"type": "integer", "minimum": 5}]})
    lenient = OutputFormat("json_schema", "response_format", value, is_strict=False)
    assert vocabulary.refusal(grammar_of(vocabulary, lenient), "7") is None
    strict = OutputFormat("json_schema", "response_format", value)
    with pytest.raises(AssertionError, match="oneOf"):
        vocabulary.refusal(grammar_of(vocabulary, strict), "7")

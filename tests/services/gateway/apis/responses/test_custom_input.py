"""The input of a custom tool is the text in its call's JSON, however that is cut."""

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.apis.responses.replies.custom_input import CustomInput


def read(arguments: str, cuts: list[int]) -> str:
    reader = CustomInput()
    places = sorted({0, *(cut % (len(arguments) + 1) for cut in cuts), len(arguments)})
    texts = [reader.push(arguments[start:end]) for start, end in pairwise(places)]
    return "".join([*texts, reader.finish()])


@given(st.text(), st.booleans(), st.lists(st.integers(0, 1000)))
def test_a_text_comes_out_as_it_was_put_into_json(
    text: str, is_ascii: bool, cuts: list[int]
) -> None:
    assert read(json.dumps({"input": text}, ensure_ascii=is_ascii), cuts) == text


@given(st.lists(st.integers(0, 1000)))
def test_other_arguments_are_the_text_themselves(cuts: list[int]) -> None:
    for arguments in ('{"patch": "a"}', '{"input": 5}', '"text"', "{}", '{"inp', "fish"):
        assert read(arguments, cuts) == arguments


@given(st.lists(st.integers(0, 1000)))
def test_an_escape_that_there_is_none_of_is_text(cuts: list[int]) -> None:
    for text in (
        r"cd C:\users\me && make",
        r"grep \d+ \x41 \u12 \u00e \ud83",
        r"\U0001F600 \ ",
        "a \\\n b",
    ):
        assert read(f'{{"input": "{text}"}}', cuts) == text
    assert read(r'{"input": "\ud83d\u0041\ud83d\ud83d\ude00"}', cuts) == "\ufffdA\ufffd😀"
    assert read(r'{"input": "\\d \n\"\q\""}', cuts) == '\\d \n"\\q"'


@given(st.lists(st.integers(0, 1000)))
def test_of_a_text_that_is_cut_nothing_is_lost(cuts: list[int]) -> None:
    assert read('{"input": "ab\\u00', cuts) == "ab\\u00"
    assert read('{"input": "ab\\', cuts) == "ab\\"
    assert read('{"input": "ab\\ud83d', cuts) == "ab\N{REPLACEMENT CHARACTER}"
    assert read('{"input": "\\ud83d b"}', cuts) == "\N{REPLACEMENT CHARACTER} b"

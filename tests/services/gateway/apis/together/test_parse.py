"""For all bytes the parser returns a valid Job or raises InvalidRequest."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.apis.messages.requests.parse import parse_messages
from services.gateway.apis.responses.requests.parse import read_request
from services.gateway.apis.tokenization.requests import parse_tokenize
from services.gateway.chat.requests import unsupported
from services.gateway.chat.requests.parse import parse_chat, parse_completion
from services.gateway.chat.requests.schema import ChatRequest, CompletionRequest
from services.gateway.mesh.open_prompt import OpenPrompt
from services.gateway.mesh.output_collector import OutputCollector
from shared.errors import InvalidRequest, NotFound
from shared.wire.codec import decode, encode
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.text.asking import STRUCTURED

COMPACT = (",", ":")


@pytest.mark.parametrize(
    ("prompt", "kinds"),
    [("a", ["text"]), (["a", "b"], ["text"] * 2), ([1, 2], ["ids"]), ([[1], [2, 3]], ["ids"] * 2)],
    ids=str,
)
@pytest.mark.parametrize("style", [{"separators": COMPACT}, {"indent": 2}, {"indent": "\r\n\t "}])
def test_the_layout_of_json_does_not_change_prompts(
    prompt: Any, kinds: list[str], style: dict[str, Any]
) -> None:
    body = json.dumps({"prompt": prompt}, **style).encode()
    job = parse_completion(body, MODEL, STRUCTURED)
    assert [each.kind for each in job.prompts] == kinds


@pytest.mark.parametrize("prompt", ["[]", "[ ]", "[\n]"])
def test_an_empty_list_is_no_prompt(prompt: str) -> None:
    with pytest.raises(InvalidRequest, match=r"prompt is \[\]"):
        parse_completion(b'{"prompt": %b}' % prompt.encode(), MODEL, STRUCTURED)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 120)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
    | st.sampled_from(["text", "user", "fish", "auto"])
)
NAMES = st.sampled_from(
    sorted({*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__})
) | st.sampled_from(sorted(unsupported.CHAT | unsupported.COMPLETION))
KEYS = st.text(max_size=3) | st.sampled_from(["role", "content", "type", "text", "include_usage"])
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(NAMES | st.text(max_size=3), VALUES, max_size=4)
PARTS = st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=3)})
CONTENTS = st.none() | st.text(max_size=5) | st.lists(PARTS, max_size=2)
MESSAGES = st.fixed_dictionaries({"role": st.text(), "content": CONTENTS, "name": VALUES})
IDS = st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1)
PROMPTS = st.text(min_size=1) | IDS


def check(parse: Any, body: bytes) -> None:
    try:
        job = parse(body, MODEL, STRUCTURED)
    except (InvalidRequest, NotFound):
        return
    for index in range(len(job.prompts)):
        collector = OutputCollector(len(job.prompts), job.num_choices)
        submit, arrays = OpenPrompt(f"a~b/{index}", index, job, collector).submit()
        message, decoded = decode([bytes(frame) for frame in encode(submit, arrays)])
        assert message == submit
        assert decoded[0].tobytes() == job.prompts[index].data.tobytes()


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(body=st.binary())
def test_any_bytes(parse: Any, body: bytes) -> None:
    check(parse, body)


@pytest.mark.parametrize("parse", [parse_chat, parse_completion])
@given(body=BODIES)
def test_any_json(parse: Any, body: dict[str, Any]) -> None:
    check(parse, json.dumps(body).encode())


@given(body=BODIES, messages=st.lists(MESSAGES, min_size=1, max_size=2))
def test_any_json_beside_good_messages(body: dict[str, Any], messages: Any) -> None:
    check(parse_chat, json.dumps(body | {"messages": messages}).encode())


@given(body=BODIES, prompt=PROMPTS | st.lists(st.text(min_size=1)) | st.lists(IDS))
def test_any_json_beside_a_good_prompt(body: dict[str, Any], prompt: Any) -> None:
    check(parse_completion, json.dumps(body | {"prompt": prompt}).encode())


@given(prompt=PROMPTS)
def test_a_good_prompt_arrives_unchanged(prompt: str | list[int]) -> None:
    job = parse_completion(json.dumps({"prompt": prompt}).encode(), MODEL, STRUCTURED)
    [sent] = job.prompts
    if isinstance(prompt, str):
        assert sent.data.tobytes().decode() == prompt
    else:
        assert sent.data.tolist() == prompt


@pytest.mark.parametrize("depth", [10, 400, 900, 990, 2000])
def test_deep_nesting_never_breaks_the_parser(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    check(parse_chat, b'{"messages":[{"role":"user","x":%b}]}' % nested.encode())


def test_a_number_too_large_for_a_float_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        parse_completion(b'{"prompt":"a","temperature":1e999}', MODEL, STRUCTURED)


ASKED = b'"messages":[{"role":"user","content":"HALF"}]'
FUNCTION = (
    b'{"name":"f","description":"HALF","parameters":{"properties":{"HALF":{"const":"HALF"}}}}'
)
CALL = b'{"id":"HALF","type":"function","function":{"name":"f","arguments":{"HALF":"HALF"}}}'
BLOCK = b'{"type":"tool_use","id":"c","name":"f","input":{"HALF":"HALF"}}'


@pytest.mark.parametrize(
    ("parse", "body"),
    [
        (parse_chat,
         b'{%b,"tool_choice":"none","tools":[{"type":"function","function":%b}]}' % (ASKED,
         FUNCTION)),
        (parse_chat, b'{"messages":[{"role":"assistant","tool_calls":[%b],"HALF":1}]}' % CALL),
        (parse_chat, b'{%b,"stop":"HALF","chat_template_kwargs":{"HALF":1}}' % ASKED),
        (parse_completion, b'{"prompt":["HALF","a"],"guided_json":{"const":"HALF"}}'),
        (parse_completion, b'{"prompt":"a","structured_outputs":{"choice":["HALF"]},"HALF":null}'),
        (parse_tokenize, b'{"prompt":"HALF"}'),
        (parse_tokenize, b"{%b}" % ASKED),
        (parse_messages, b'{"max_tokens":1,"messages":[{"role":"user","content":"HALF"}]}'),
        (parse_messages,
         b'{"max_tokens":1,"messages":[{"role":"user","content":"x"},'
         b'{"role":"assistant","content":[%b]},{"role":"user","content":"x"}]}' % BLOCK),
        (read_request, b'{"input":[{"role":"user","content":"HALF"}],"instructions":"HALF"}'),
    ],
)  # fmt: skip
def test_half_a_character_is_a_replacement_character(parse: Any, body: bytes) -> None:
    """In any place: truncated texts leave these halves in histories."""
    arguments: dict[Any, tuple[Any, ...]] = {parse_tokenize: (MODEL,), read_request: ()}
    parsed = [
        parse(body.replace(b"HALF", half), *arguments.get(parse, (MODEL, STRUCTURED)))
        for half in (rb"half \ud83d", rb"half \ufffd")
    ]
    mended, expected = (re.sub(r"seed=\d+", "", repr(each)) for each in parsed)  # drawn for each
    assert mended == expected

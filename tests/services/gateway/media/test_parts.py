"""Images in the parts of chats: the forms, the rest of the messages, and every refusal."""

import base64
import json
from typing import Any

import pytest

from shared.errors import InvalidRequest
from shared.wire.messages import Medium
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.media.asking import (
    FILE,
    SEER,
    data_url,
    files_of,
    image,
    messages_of,
    parsed,
    prompt_of,
    user,
)

TEXT = {"type": "text", "text": "Describe it."}
URL = data_url()
PLACE = "messages[0].content[0]"


@pytest.mark.parametrize(
    ("part", "medium"),
    [
        ({"type": "image_url", "image_url": {"url": URL}}, Medium(param=f"{PLACE}.image_url.url")),
        ({"type": "image_url", "image_url": {"url": URL, "detail": "low"}, "uuid": "u"},
         Medium(param=f"{PLACE}.image_url.url", detail="low")),
        ({"type": "image_url", "image_url": {"url": URL, "detail": None}},
         Medium(param=f"{PLACE}.image_url.url")),
        ({"type": "image_url", "image_url": URL}, Medium(param=f"{PLACE}.image_url")),
        ({"type": "input_image", "image_url": URL, "detail": "original"},
         Medium(param=f"{PLACE}.image_url", detail="original")),
    ],
)  # fmt: skip
def test_each_form_of_an_image(part: dict[str, Any], medium: Medium) -> None:
    prompt = prompt_of(user(part, TEXT))
    assert messages_of(prompt) == [user({"type": "image", "media": 0}, TEXT)]
    assert files_of(prompt) == [FILE]
    assert prompt.media[0].medium == medium
    assert prompt.num_bytes == len(prompt.data) + len(FILE)


def test_images_are_numbered_through_all_messages_of_all_roles() -> None:
    files = [bytes([n]) * (n + 1) for n in range(5)]
    parts = [image(file) for file in files]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": [parts[0]]},
        {"role": "user", "content": "a"},
        user(parts[1], TEXT, parts[2]),
        {"role": "assistant", "content": [TEXT], "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [TEXT, parts[3]]},
        {"role": "developer", "content": [parts[4]]},
    ]
    prompt = prompt_of(*messages)
    assert files_of(prompt) == files
    expected = json.dumps(messages)
    for number, part in enumerate(parts):
        reference = json.dumps({"type": "image", "media": number})
        expected = expected.replace(json.dumps(part), reference)
    assert messages_of(prompt) == json.loads(expected)


ODD = b'{"role":"user", "content":"\\ud83d\\ude00 \\u00e9","n":12345678901234567890123, "f":1e400}'


def test_all_else_stays_the_json_that_it_is() -> None:
    part = json.dumps(image()).encode()
    odd_part = b'{ "type":"text","text":"a\\/b","n":9007199254740993.0 }'
    body = b'{"messages": [%b,{"role":"user","id":18446744073709551617,"content": [%b, %b]} ,%b]}'
    [prompt] = parsed(body % (ODD, odd_part, part, ODD)).prompts
    changed = b'{"role":"user","id":18446744073709551617,"content":[%b,%b]}'
    reference = b'{"type":"image","media":0}'
    assert prompt.data.tobytes() == b"[%b,%b,%b]" % (ODD, changed % (odd_part, reference), ODD)


def test_without_images_not_a_byte_changes() -> None:
    messages = b'[ %b , {"role":"user","content":[ {"type":"text","text":"a"} ]} ]' % ODD
    [prompt] = parsed(b'{"messages":%b}' % messages).prompts
    assert prompt.data.tobytes() == messages
    assert not prompt.media


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 190_000, 196_608, 196_609, 400_000])
@pytest.mark.parametrize("is_escaped", [False, True])
def test_files_of_all_sizes(num_bytes: int, is_escaped: bool) -> None:
    file = (bytes(range(256)) * (num_bytes // 256 + 1))[:num_bytes]
    body = json.dumps({"messages": [user(TEXT, image(file))]})
    body = body.replace("/", r"\/") if is_escaped else body
    [prompt] = parsed(body.encode()).prompts
    assert files_of(prompt) == [file]
    assert messages_of(prompt) == [user(TEXT, {"type": "image", "media": 0})]


@pytest.mark.parametrize(
    "head", ["DATA:image/png;base64", "data:image/png;charset=x;Base64", "data:IMAGE/webp;base64"]
)
def test_heads_of_urls(head: str) -> None:
    url = f"{head},{base64.b64encode(FILE).decode()}"
    assert files_of(prompt_of(user({"type": "image_url", "image_url": url}))) == [FILE]


def refused(*messages: Any, model=SEER, **settings: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parsed({"messages": [*messages]}, model, **settings)
    return caught.value


@pytest.mark.parametrize(
    ("url", "text"),
    [
        (
            "https://a.example/1.png",
            'is "https://a.example/1.png"; nothing is fetched (allowed-media-domains), expected',
        ),
        ("file:///etc/passwd", 'is "file:///etc/passwd"; expected a data: URL'),
        ("", 'is ""; expected a data: URL'),
        (base64.b64encode(FILE).decode()[:20], 'is "AAECAwQFBgcICQoLDA0O"; expected a data: URL'),
        ("data:image/png,abc", "it has no base64"),
        ("data:image/png;base64", "it has no base64"),
        ("data:image/png;base64;a=b,QUJD", "it has no base64"),
        ("data:;base64,QUJD", "its media type is none of an image"),
        ("data:text/html;base64,QUJD", "its media type is none of an image"),
        ("data:image/png;base64,", "has no data"),
        ("data:image/png;base64,QUJ", "is not base64: incorrect padding"),
        ("data:image/png;base64,QU JD", "is not base64: only base64 data"),
        ("data:image/png;base64,QU-_", "is not base64: only base64 data"),
        ("data:image/png;base64,QUJDé", "is not base64: only base64 data"),
        ("data:image/png;base64,QQ==QUJD", "is not base64: excess data"),
        (f"data:image/png;base64,{'A' * ((256 << 10) - 2)}==QUJD", "is not base64: excess data"),
        ({"no": "url"}, "messages[0].content[0].image_url.url is required"),
        ({"url": None}, "messages[0].content[0].image_url.url is required"),
        ({"url": 5}, "messages[0].content[0].image_url.url is 5; expected a data: URL"),
        (5, "messages[0].content[0].image_url is 5; expected object"),
        (None, "messages[0].content[0].image_url is required"),
    ],
)
def test_malformed_images_are_refused(url: Any, text: str) -> None:
    error = refused(user({"type": "image_url", "image_url": url}))
    assert text in error.message
    assert error.param is not None
    assert error.param.startswith("messages[0].content[0].image_url")
    assert error.status == 400


def test_an_unknown_detail_is_named() -> None:
    error = refused(user(image(detail="best")))
    assert error.param == "messages[0].content[0].image_url.detail"
    assert error.message.endswith('is "best"; expected one of auto, low, high, original')
    error = refused(user({"type": "input_image", "image_url": URL, "detail": "best"}))
    assert error.param == "messages[0].content[0].detail"


def test_an_image_is_a_url_or_the_id_of_a_file() -> None:
    both = {"type": "input_image", "file_id": "file-1", "image_url": URL}
    error = refused(user(both))
    assert error.message == f"{PLACE}.image_url is given in addition to {PLACE}.file_id"
    for wrong in (5, ["file-1"], "a" * 300):
        error = refused(user({"type": "input_image", "file_id": wrong}))
        assert error.param == f"{PLACE}.file_id"
        assert "expected the id of a file" in error.message


@pytest.mark.parametrize("role", ["assistant", "function"])
def test_only_some_roles_have_images(role: str) -> None:
    error = refused({"role": role, "name": "f", "content": [TEXT, image()]})
    assert error.param == "messages[0].content[1]"
    assert f"is an image of role {role}; expected one of user, system" in error.message


def test_a_model_without_images_takes_none_and_nothing_is_decoded() -> None:
    broken = {"type": "image_url", "image_url": "data:image/png;base64,?"}
    error = refused(user(broken), model=MODEL)
    assert error.param == "messages[0].content[0].type"
    assert error.message.endswith('.type is "image_url"; the model fish takes no images')


def test_a_reference_of_a_client_is_refused() -> None:
    error = refused(user(image(), {"type": "image", "media": 0}))
    assert error.message.startswith(
        'messages[0].content[1].type is "image", which is not supported'
    )


def test_the_last_of_two_contents_is_checked() -> None:
    long = json.dumps([{"type": "text", "text": "a" * (300 << 10)}]).encode()
    reference = b'[{"type":"image","media":0}]'
    body = b'{"messages":[{"role":"user","content":%b,"content":%b}]}'
    with pytest.raises(InvalidRequest, match='type is "image"'):
        parsed(body % (long, reference))
    with pytest.raises(InvalidRequest, match='type is "image"'):
        parsed(body % (b'"%b"' % (b"a" * (300 << 10)), reference))
    assert parsed(body % (reference, long)).prompts


@pytest.mark.parametrize("num_chars", [3, 300 << 10])
def test_other_fields_of_a_message_with_an_image_stay(num_chars: int) -> None:
    name = "a" * num_chars
    content = json.dumps([image(bytes(num_chars))])
    form = '{"name":"NAME\\n","role":"user", "content":CONTENT, "x":["NAME"]}'.replace("NAME", name)
    message = form.replace("CONTENT", content)
    [prompt] = parsed(b'{"messages":[%b]}' % message.encode()).prompts
    changed = form.replace("CONTENT", '[{"type":"image","media":0}]').replace(", ", ",")
    assert prompt.data.tobytes().decode() == f"[{changed}]"
    with pytest.raises(InvalidRequest, match="not JSON"):
        parsed(b'{"messages":[%b]}' % message.replace("\\n", "\\q").encode())


@pytest.mark.parametrize("first", [[image(bytes(300 << 10))], "a" * (300 << 10)])
def test_an_empty_text_counts_where_it_is_the_last(first: Any) -> None:
    content = b'[{"role":"user","content":%b,"content":""}]' % json.dumps(first).encode()
    [prompt] = parsed(b'{"messages":%b}' % content).prompts
    assert prompt.data.tobytes() == content
    refusal = b'{"role":"assistant","refusal":"%b","refusal":""}' % (b"a" * (300 << 10))
    with pytest.raises(InvalidRequest, match="content is required"):
        parsed(b'{"messages":[%b]}' % refusal)


def test_the_number_of_images_has_a_limit() -> None:
    one = [user(image())]
    assert len(prompt_of(*one * 2, limit_mm_per_prompt={"image": 2}).media) == 2
    error = refused(*one * 3, limit_mm_per_prompt={"image": 2})
    assert error.param == "messages[2].content[0]"
    assert 'the limit is limit-mm-per-prompt = {"image": 2}' in error.message
    assert len(prompt_of(*one * 32).media) == 32
    assert "image 33 of the request" in refused(*one * 33).message


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [(None, ""), ({}, ""), ({"max_pixels": 784, "x": [1e2]}, '{"max_pixels": 784, "x": [100.0]}')],
)
def test_options_go_with_images_as_they_are(kwargs: Any, text: str) -> None:
    body = {"messages": [user(image())], "mm_processor_kwargs": kwargs}
    assert parsed(body).prompts[0].media_options == text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"messages": [user(image())], "mm_processor_kwargs": [1]}, "expected object"),
        (
            {"messages": [user(TEXT)], "mm_processor_kwargs": {"max_pixels": 784}},
            "mm_processor_kwargs is an object, which is not supported; allowed: null or {}",
        ),
    ],
)
def test_options_that_fit_nothing_are_refused(body: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text) as caught:
        parsed(body)
    assert caught.value.param == "mm_processor_kwargs"
    assert parsed({"messages": [user(TEXT)], "mm_processor_kwargs": {}}).prompts

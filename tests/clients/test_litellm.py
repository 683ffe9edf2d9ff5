"""LiteLLM, by each of its ways to reach a server."""

import json
import os
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise its import downloads prices

import litellm
import pytest

MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
SUM: Any = {"role": "user", "content": "What is 12 + 30?"}
PRODUCT: Any = {"role": "user", "content": "What is 1234 * 56?"}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def asked(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Common arguments of calls by one of its providers; Anthropic's appends ``/v1``."""
    base = url.removesuffix("/v1") if request.param == "anthropic" else url
    model = f"{request.param}/shoal-tiny"
    fields = {"model": model, "api_base": base, "api_key": "none", "temperature": 0}
    return fields | {"max_tokens": 100, "num_retries": 0}


def test_a_text_is_streamed_as_it_is_given_whole(asked: dict[str, Any]):
    whole = litellm.completion(**asked, messages=[SUM])
    chunks = list(litellm.completion(**asked, messages=[SUM], stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert "42" in whole.choices[0].message.content
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.usage.completion_tokens > 0


async def test_a_loop_of_tools_ends_with_an_answer(asked: dict[str, Any]):
    asked = asked | {"tools": [MULTIPLY]}
    first = await litellm.acompletion(**asked, messages=[PRODUCT])
    message = first.choices[0].message
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 1234, "b": 56}
    result = {"role": "tool", "tool_call_id": call.id, "content": "69104"}
    second = await litellm.acompletion(**asked, messages=[PRODUCT, message, result])
    assert "69104" in second.choices[0].message.content


def test_an_error_is_of_its_class(asked: dict[str, Any]):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**asked | {"temperature": 9}, messages=[SUM])


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_is_one_of_openais(url: str, is_stream: bool):
    reply = litellm.responses(
        model="openai/shoal-tiny",
        input="What is 12 + 30?",
        api_base=url,
        api_key="none",
        temperature=0,
        stream=is_stream,
    )
    if is_stream:
        reply = list(reply)[-1].response
    assert reply.status == "completed"
    assert "42" in reply.output[0].content[0].text


async def test_a_message_is_one_of_anthropics(url: str):
    reply = await litellm.anthropic.messages.acreate(
        model="anthropic/shoal-tiny",
        messages=[SUM],
        max_tokens=100,
        api_base=url.removesuffix("/v1"),
        api_key="none",
        temperature=0,
    )
    assert "42" in reply["content"][0]["text"]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_texts_are_embedded(pooling_url: str, provider: str):
    fields = {"api_base": pooling_url, "api_key": "none", "encoding_format": "float"}
    reply = litellm.embedding(f"{provider}/shoal-tiny", ["one text", "another"], **fields)
    first, second = (each["embedding"] for each in reply.data)
    assert len(first) == len(second) > 1
    assert first != second

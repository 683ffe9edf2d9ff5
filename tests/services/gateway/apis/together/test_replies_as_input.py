"""Every reply in the types of OpenAI's client is valid history, and so is every reply of
Anthropic's."""

import json
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletionMessage
from openai.types.responses import (
    ResponseCustomToolCall,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)

from services.gateway.apis.messages.requests.parse import parse_messages
from services.gateway.apis.responses.requests.conversation import chat_messages
from services.gateway.apis.responses.requests.parse import read_request
from services.gateway.chat.requests.parse import parse_chat
from services.tokenizer.chat.normalize import normalize
from services.tokenizer.chat.template_traits import TemplateTraits
from tests.services.gateway.fakes import MODEL
from tests.services.gateway.text.asking import STRUCTURED

FUNCTION = {"name": "now", "arguments": '{"zone": "UTC"}'}
CALL = {"id": "c1", "type": "function", "function": FUNCTION}
CUSTOM = {"id": "c2", "type": "custom", "custom": {"name": "shell", "input": "ls"}}
URL = {"url": "http://a", "title": "A", "start_index": 0, "end_index": 1}
ANNOTATION = {"type": "url_citation", "url_citation": URL}
AUDIO = {"id": "a1", "data": "", "expires_at": 1, "transcript": "hi"}
EVERYTHING = {
    "content": "hi",
    "refusal": None,
    "annotations": [ANNOTATION],
    "audio": AUDIO,
    "function_call": FUNCTION,
    "tool_calls": [CALL, CUSTOM],
}
CUSTOM_FUNCTION = {"name": "shell", "arguments": {"input": "ls"}}


def in_a_chat(message: dict[str, Any]) -> dict[str, Any]:
    """The message as a template gets it."""
    user = {"role": "user", "content": "x"}
    body = json.dumps({"messages": [user, message, user]}).encode()
    [prompt] = parse_chat(body, MODEL, STRUCTURED).prompts
    return normalize(msgspec.json.decode(prompt.data.tobytes()), TemplateTraits())[1]


def test_a_chats_reply_may_have_every_field():
    reply = ChatCompletionMessage.model_validate({"role": "assistant", **EVERYTHING})
    found = in_a_chat(reply.model_dump())
    assert found["content"] == "hi"
    assert [each["function"] for each in found["tool_calls"]] == [
        {"name": "now", "arguments": {"zone": "UTC"}},
        CUSTOM_FUNCTION,
    ]
    assert {each["type"] for each in found["tool_calls"]} == {"function"}


@pytest.mark.parametrize("fields", EVERYTHING)
def test_a_chats_reply_may_have_each_field_alone(fields: str):
    message = {"content": None if fields != "annotations" else "", fields: EVERYTHING[fields]}
    if fields in ("audio", "refusal"):
        message["content"] = "hi"
    reply = ChatCompletionMessage.model_validate({"role": "assistant", **message})
    assert in_a_chat(reply.model_dump())["role"] == "assistant"


def test_a_refusal_counts_as_the_assistants_text():
    reply = ChatCompletionMessage(role="assistant", content=None, refusal="I cannot.")
    assert in_a_chat(reply.model_dump())["content"] == "I cannot."
    parts = [{"type": "text", "text": "Well. "}, {"type": "refusal", "refusal": "I cannot."}]
    message = {"role": "assistant", "content": parts}
    assert in_a_chat(message)["content"] == "Well. I cannot."
    taken = normalize([message], TemplateTraits(takes_parts=True))[0]["content"]
    assert taken == [parts[0], {"type": "text", "text": "I cannot."}]


def test_a_responses_items_may_have_every_field():
    annotation = {"type": "url_citation", **URL}
    logprob = {"token": "hi", "bytes": [104, 105], "logprob": -1.0, "top_logprobs": []}
    text = {"type": "output_text", "text": "hi", "annotations": [annotation], "logprobs": [logprob]}
    refusal = {"type": "refusal", "refusal": "no"}
    items = [
        ResponseReasoningItem.model_validate(
            {
                "id": "r1",
                "type": "reasoning",
                "summary": [{"type": "summary_text", "text": "so"}],
                "content": [{"type": "reasoning_text", "text": "thus"}],
                "encrypted_content": "x",
                "status": "completed",
            }
        ),
        ResponseOutputMessage.model_validate(
            {
                "id": "m1",
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "phase": "commentary",
                "content": [text, refusal],
            }
        ),
        ResponseFunctionToolCall.model_validate(
            {
                "id": "f1",
                "type": "function_call",
                "call_id": "c1",
                "status": "completed",
                "caller": {"type": "direct"},
                "namespace": None,
                **FUNCTION,
            }
        ),
        ResponseCustomToolCall.model_validate(
            {
                "id": "t1",
                "type": "custom_tool_call",
                "call_id": "c2",
                "name": "shell",
                "input": "ls",
                "status": "completed",
                "namespace": None,
            }
        ),
    ]
    body = json.dumps({"input": [each.model_dump() for each in items]}).encode()
    messages = msgspec.json.decode(
        chat_messages(None, read_request(body).items, lambda _: None).json
    )
    [message] = normalize(messages, TemplateTraits())
    assert (message["reasoning"], message["content"]) == ("thus", "hino")
    assert [call["function"] for call in message["tool_calls"]][1] == CUSTOM_FUNCTION


def test_a_messages_reply_may_have_every_field():
    citation = {"type": "char_location", "cited_text": "a", "document_index": 0}
    blocks = [
        {"type": "thinking", "thinking": "so", "signature": "s"},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "hi", "citations": [citation]},
        {"type": "text", "text": "", "citations": None},
        {
            "type": "tool_use",
            "id": "c1",
            "name": "now",
            "input": {"zone": "UTC"},
            "caller": {"type": "direct"},
        },
    ]
    result = {"type": "tool_result", "tool_use_id": "c1", "content": None}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": [result]},
    ]
    body = json.dumps({"max_tokens": 1, "messages": turns}).encode()
    assert parse_messages(body, MODEL, STRUCTURED)

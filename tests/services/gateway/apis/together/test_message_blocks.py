"""Anthropic's messages that think and call tools, whole and streamed."""

from typing import Any

import pytest

from services.gateway.apis.messages.requests.signature import signed_text
from shared.wire.messages import OutputStart
from tests.services.gateway.apis.messages.asking import WEATHER
from tests.services.gateway.apis.messages.test_messages import ADAPTIVE, STREAMED, ask, check_count
from tests.services.gateway.asking import CALLER
from tests.services.gateway.client import Client, with_model
from tests.services.gateway.fakes import NUM_PROMPT_TOKENS
from tests.services.gateway.marked import REPLY

pytestmark = with_model(CALLER)


@STREAMED
async def test_a_message_thinks_speaks_and_calls(client: Client, stream: bool):
    asked = {"thinking": ADAPTIVE, "tools": [WEATHER], "start": OutputStart.REASONING}
    message = await ask(client, REPLY, stream=stream, num_cached=3, **asked)
    thinking, said, *calls = message["content"]
    signature = thinking["signature"]
    assert thinking == {"type": "thinking", "thinking": "Hm", "signature": signature}
    assert signed_text(CALLER.fingerprint, "Hm", signature) == "Hm"
    assert said == {"type": "text", "text": "So:"}
    assert [call | {"id": ""} for call in calls] == [
        {"type": "tool_use", "id": "", "name": "weather", "input": {"city": "Ulm"}}
    ] * 2
    assert calls[0]["id"] != calls[1]["id"]
    assert (message["role"], message["model"]) == ("assistant", "fish")
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert message["usage"] == {
        "input_tokens": NUM_PROMPT_TOKENS - 3,
        "cache_read_input_tokens": 3,
        "cache_creation_input_tokens": 0,
        "output_tokens": len(REPLY),
        "output_tokens_details": {"thinking_tokens": 1},
    }


@STREAMED
@pytest.mark.parametrize("ttl", ["5m", "1h"])
async def test_tokens_that_a_cache_mark_adds_are_counted(client: Client, stream: bool, ttl: str):
    tools = [WEATHER | {"cache_control": {"type": "ephemeral", "ttl": ttl}}]
    message = await ask(client, REPLY, stream=stream, tools=tools, num_cached=1)
    num = NUM_PROMPT_TOKENS - 2
    usage = message["usage"]
    assert usage["input_tokens"] == usage["cache_read_input_tokens"] == 1
    assert usage["cache_creation_input_tokens"] == num
    counts = {f"ephemeral_{each}_input_tokens": 0 for each in ("5m", "1h")}
    assert usage["cache_creation"] == counts | {f"ephemeral_{ttl}_input_tokens": num}


@STREAMED
async def test_thinking_that_is_omitted_is_in_its_signature_alone(client: Client, stream: bool):
    asked = {"thinking": ADAPTIVE | {"display": "omitted"}, "start": OutputStart.REASONING}
    message = await ask(client, ["Hm", ", well", "</think>", "So."], stream=stream, **asked)
    thinking, said = message["content"]
    assert (thinking["thinking"], said["text"]) == ("", "So.")
    assert signed_text(CALLER.fingerprint, "", thinking["signature"]) == "Hm, well"


@STREAMED
async def test_a_call_that_is_cut_has_no_input_and_the_reason_says_so(client: Client, stream: bool):
    cut = ["<tool_call>", '\n{"name": "weather", "arguments": ', '{"city": "U']
    more: Any = {"tools": [WEATHER], "reason": "length", "max_tokens": 3}
    message = await ask(client, cut, stream=stream, **more)
    (call,) = message["content"]
    assert (call["name"], call["input"]) == ("weather", {})
    assert message["stop_reason"] == "max_tokens"


@STREAMED
async def test_a_call_of_a_named_tool_is_a_use_of_it(client: Client, stream: bool):
    named: Any = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
    message = await ask(client, REPLY[3:8], stream=stream, **named)
    assert message["stop_reason"] == "tool_use"


async def test_tools_are_counted_with_the_prompt(client: Client):
    await check_count(client, tools=[WEATHER])

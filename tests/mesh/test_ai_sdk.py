"""Requests that Vercel's AI SDK has sent, answered by real processes as its schemas want it."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from jsonschema import Draft202012Validator

from benchmarks.harness.fleet import running_fleet
from tests.mesh.forks import fork

SETTINGS = {"DTYPE": "float32", "MAX_MODEL_LEN": "1024", "NUM_THREADS": "1"}
MAX_AT_ONCE = 6
RECORDED = sorted((Path(__file__).parent / "recorded").glob("ai-sdk-*.json"))


def maybe(kind: str) -> dict[str, Any]:
    return {"type": [kind, "null"]}


def made_of(required: dict[str, Any], optional: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": required | optional, "required": list(required)}


def list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": ["array", "null"], "items": item}


HEAD = {"id": maybe("string"), "created": maybe("number"), "model": maybe("string")}
NUMBER, STRING = {"type": "number"}, {"type": "string"}
ROLE = {"enum": ["assistant", None]}
TEXTS = {name: maybe("string") for name in ("content", "refusal", "reasoning", "reasoning_content")}
CACHED = made_of({}, {"cached_tokens": maybe("number")})
DETAILS = made_of(
    {},
    {
        f"{kind}_tokens": maybe("number")
        for kind in ("reasoning", "accepted_prediction", "rejected_prediction")
    },
)
USAGE = made_of(
    {"prompt_tokens": NUMBER, "completion_tokens": NUMBER},
    {
        "total_tokens": maybe("number"),
        "prompt_tokens_details": CACHED,
        "completion_tokens_details": DETAILS,
    },
)
CALL = made_of(
    {"type": {"const": "function"}, "function": made_of({"name": STRING, "arguments": STRING}, {})},
    {"id": STRING},
)
CALL_PART = made_of(
    {
        "index": NUMBER,
        "function": made_of({}, {"name": maybe("string"), "arguments": maybe("string")}),
    },
    {"id": maybe("string"), "type": {"enum": ["function", None]}},
)
END = {"finish_reason": maybe("string")}
MESSAGE = made_of({}, TEXTS | {"role": ROLE, "tool_calls": list_of(CALL)})
DELTA = made_of({}, TEXTS | {"role": ROLE, "tool_calls": list_of(CALL_PART)})


def reply_of(choice: dict[str, Any], usage: dict[str, Any]) -> Draft202012Validator:
    choices = {"type": "array", "items": choice}
    return Draft202012Validator(made_of({"choices": choices}, HEAD | {"usage": usage}))


NO_USAGE = {"anyOf": [USAGE, {"type": "null"}]}
CHAT = reply_of(made_of({"message": MESSAGE, "index": NUMBER}, END), USAGE)
CHUNK = reply_of(made_of({"delta": DELTA, "index": NUMBER}, END), NO_USAGE)
TEXT = reply_of(made_of({"text": STRING, "finish_reason": STRING}, {}), USAGE)
TEXT_CHUNK = reply_of(made_of({"text": STRING, "index": NUMBER}, END), NO_USAGE)
PROBLEM = made_of({"message": STRING}, {"type": maybe("string"), "param": maybe("string")})
ERROR = Draft202012Validator(made_of({"error": PROBLEM}, {}))


def check_stream(events: list[str], schema: Draft202012Validator) -> dict[str, Any]:
    """The choice of a stream as a whole reply has it. The SDK throws where a call does not begin
    with its id and its name, and begins a text with any content, be it empty."""
    assert events.pop() == "[DONE]"
    texts: list[str] = []
    has_content = False
    calls: list[dict[str, str]] = []
    reasons: list[str] = []
    for each in map(json.loads, events):
        schema.validate(each)
        for choice in each["choices"]:
            delta = choice.get("delta", choice)
            has_content |= delta.get("content") is not None
            texts.append(delta.get("content") or delta.get("text") or "")
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(calls):
                    assert part["id"]
                    assert not texts[-1], "no text is begun where a call comes first"
                    calls.append({"name": part["function"]["name"], "arguments": ""})
                assert part["index"] == len(calls) - 1
                calls[-1]["arguments"] += part["function"]["arguments"]
            reasons += [reason] if (reason := choice["finish_reason"]) else []
    (reason,) = reasons
    assert not (calls and has_content and not "".join(texts))
    return {"text": "".join(texts), "calls": calls, "finish_reason": reason}


def check_whole(reply: dict[str, Any], schema: Draft202012Validator) -> dict[str, Any]:
    schema.validate(reply)
    (choice,) = reply["choices"]
    message = choice.get("message", {})
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    text = message.get("content") if message else choice["text"]
    return {"text": text or "", "calls": calls, "finish_reason": choice["finish_reason"]}


def check_forms(body: dict[str, Any], choice: dict[str, Any]) -> None:
    """The SDK parses calls and objects with the schemas that it has sent."""
    is_whole = choice["finish_reason"] != "length"
    schemas = {
        each["function"]["name"]: each["function"]["parameters"] for each in body.get("tools", ())
    }
    for call in choice["calls"] if is_whole else choice["calls"][:-1]:
        jsonschema.validate(json.loads(call["arguments"]), schemas[call["name"]])
    if body.get("tool_choice", "auto") not in ("auto", "none"):
        assert choice["calls"]
    schema = body.get("response_format", {}).get("json_schema", {}).get("schema", {})
    if "response_format" in body and is_whole:
        jsonschema.validate(json.loads(choice["text"]), schema)


async def test_what_the_sdk_has_sent_is_answered_as_its_schemas_want_it(
    tmp_path: Path, subtests: pytest.Subtests
):
    async with running_fleet(tmp_path, SETTINGS, fork) as fleet:
        await fleet.start_all(scheduler=1, worker=1, tokenizer=1, gateway=1)
        (gateway,) = fleet.of("gateway")
        for recorded in map(json.loads, (path.read_text() for path in RECORDED)):
            async with aiohttp.ClientSession(gateway.url, headers=recorded["headers"]) as session:
                at_once = asyncio.Semaphore(MAX_AT_ONCE)
                replays = (replay(session, sent, at_once) for sent in recorded["requests"])
                ends = await asyncio.gather(*replays, return_exceptions=True)
            for sent, error in zip(recorded["requests"], ends, strict=True):
                with subtests.test(versions=str(recorded["versions"]), call=sent["call"]):
                    if error:
                        raise error
            assert not any(ends), "the fleet says what it saw"
        await fleet.until_idle()


async def replay(
    session: aiohttp.ClientSession, sent: dict[str, Any], at_once: asyncio.Semaphore
) -> None:
    body = sent["body"]
    data = json.dumps(body).encode()
    is_chat = sent["path"] == "/v1/chat/completions"
    async with at_once, session.post(sent["path"], data=data) as response:
        text = await response.text()
    assert response.status == sent["status"], text
    if response.status != 200:
        ERROR.validate(json.loads(text))
        return
    if body.get("stream"):
        assert response.content_type == "text/event-stream"
        events = [line[len("data: ") :] for line in text.splitlines() if line.startswith("data: ")]
        choice = check_stream(events, CHUNK if is_chat else TEXT_CHUNK)
    else:
        choice = check_whole(json.loads(text), CHAT if is_chat else TEXT)
    check_forms(body, choice)
    assert choice["text"] or choice["calls"]

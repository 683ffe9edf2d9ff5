"""Every refusal has its status, and the same body."""

import asyncio
import gzip
import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from services.gateway.chat import endpoint, generation
from services.gateway.chat.completions import Completions
from services.gateway.chat.requests.parse import parse_completion
from services.gateway.http import body
from services.gateway.mesh.job import Job
from services.gateway.metrics import BUFFERED_BYTES
from services.gateway.service import GatewayService
from shared.errors import NO_SCHEDULER, NO_WORKER
from shared.wire.messages import ModelInfo, SamplingDefaults, State
from tests.services.gateway.client import (
    CHAT,
    HI,
    TEXT,
    Client,
    client_of,
    raw_answer,
    with_settings,
)
from tests.services.gateway.fakes import MODEL, fake_tokenizer, running_gateway, until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BEST_OF = (
    "best_of is 2, which is not supported (choices are not ranked here; n gives all of them);"
    " allowed: null or 1"
)


async def test_the_type_of_a_body_is_json_or_415(client: Client) -> None:
    async def post(path: str, kind: str) -> Any:
        return await client.send("POST", path, data=text, headers={"Content-Type": kind})

    text = json.dumps({"prompt": "a"})
    for path in (TEXT, CHAT):
        for wrong in ("text/plain", "application/x-www-form-urlencoded; charset=utf-8"):
            answer = await post(path, wrong)
            assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
            assert wrong.partition(";")[0] in answer.error["message"]
    assert client.tokenizer.submitted.empty()
    for right in ("application/json", "Application/JSON; charset=utf-8", ""):
        answer, _ = await asyncio.gather(post(TEXT, right), client.tokenizer.answer("y"))
        assert answer.status == 200


async def test_no_answer_names_the_versions_behind_it(client: Client) -> None:
    for path in ("/health", "/no/such/path", TEXT):
        assert (await client.get(path)).headers["Server"] == "shoal"
    answer = await raw_answer(client.gateway, b"this is no HTTP\r\n\r\n", end=b"\r\n\r\n")
    assert b"Server: shoal\r\n" in answer


@pytest.mark.parametrize(
    ("path", "fields", "status", "error"),
    [
        (CHAT, {"temperature": 3}, 400,
         ("temperature is 3; expected float <= 2.0", "temperature", "invalid_value")),
        (CHAT, {"best_of": 2}, 400, (BEST_OF, "best_of", "unsupported_parameter")),
        (CHAT, {"model": "cat"}, 404,
         ('model is "cat"; served here: fish, org/fish', "model", "model_not_found")),
        (CHAT[3:], {}, 404,
         (f'POST "{CHAT[3:]}": Not Found; did you mean {CHAT}?', None, "not_found")),
        ("/v2/nothing", {}, 404, ('POST "/v2/nothing": Not Found', None, "not_found")),
    ],
    ids=["value", "unbuilt parameter", "unknown model", "path without v1", "unknown path"],
)  # fmt: skip
async def test_a_wrong_request_is_named(
    client: Client, path: str, fields: dict[str, Any], status: int, error: tuple[Any, ...]
) -> None:
    found = await client.refused(status, path, messages=HI, **fields)
    assert (found["message"], found["param"], found["code"]) == error
    assert found["type"] == "invalid_request_error"


async def test_a_body_that_is_not_json_is_400(client: Client) -> None:
    answer = await client.send("POST", CHAT, data=b"{")
    assert (answer.status, answer.error["code"]) == (400, "invalid_json")


async def test_a_wrong_method_is_405_and_names_the_allowed_ones(client: Client) -> None:
    answer = await client.get(CHAT)
    assert (answer.status, answer.headers["Allow"]) == (405, "POST")
    assert answer.error["code"] == "method_not_allowed"


async def test_headers_beyond_the_limit_of_their_sum_are_431(client: Client) -> None:
    headers = {f"A-{number}": "x" * 7000 for number in range(10)}
    answer = await client.send("POST", TEXT, json={"prompt": "a"}, headers=headers)
    assert answer.status == 431
    assert "the limit is 65536" in answer.error["message"]


async def test_a_refusal_from_below_keeps_its_status_and_fields(client: Client) -> None:
    asked, request = await client.begun(CHAT, messages=HI, stream=True)
    request.fail(429, "full", "no slot is free", param="messages", retry_after_s=2.5)
    answer = await asked
    assert (answer.status, answer.headers["Retry-After"]) == (429, "3")
    assert answer.error == {
        "message": "no slot is free", "type": "some_error", "param": "messages", "code": "full",
    }  # fmt: skip


async def test_an_unexpected_exception_is_500_and_logged_with_the_request_id(
    client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def explode(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Completions, "serve", explode)
    answer = await client.post(CHAT, messages=HI)
    assert answer.status == 500
    assert "secret" not in answer.error["message"]
    assert answer.headers["X-Request-Id"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_body_that_never_comes_is_408(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def beginning() -> Any:
        yield b"{"
        await never.wait()

    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.01)
    answer = await client.send("POST", TEXT, data=beginning())
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert "did not come within 0.01 s" in answer.error["message"]
    never.set()


@with_settings(max_body_bytes=1000)
class TestBodyLimit:
    async def test_too_long_by_its_header_is_413_before_the_body_comes(
        self, gateway: GatewayService
    ) -> None:
        for more in (b"\r\n", b"Expect: 100-continue\r\n\r\n"):
            head = HEAD + b"Content-Length: 1000000000000\r\n" + more
            answer = await raw_answer(gateway, head, end=b"}}")
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"1000000000000 bytes; the limit is 1000" in answer

    async def test_too_long_without_a_length_is_413(self, client: Client) -> None:
        async def chunks() -> Any:
            for _ in range(3):
                yield b"x" * 500

        answer = await client.send("POST", TEXT, data=chunks())
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")

    @pytest.mark.parametrize(
        ("packed", "status"),
        [(gzip.compress(b"x" * 100_000), 413), (b"abc", 400)],
        ids=("large", "broken"),
    )
    async def test_packed_bodies_have_the_limit_unpacked(
        self, client: Client, packed: bytes, status: int
    ) -> None:
        answer = await client.send("POST", TEXT, data=packed, headers={"Content-Encoding": "gzip"})
        assert answer.status == status
        assert answer.error

    async def test_a_client_that_expects_100_continue_gets_it(
        self, gateway: GatewayService
    ) -> None:
        head = HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
        assert await raw_answer(gateway, head, end=b"\r\n") == b"HTTP/1.1 100 Continue\r\n"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_open_requests": 1}, "max-open-requests = 1"),
        ({"max_buffered_bytes": 1000}, "max-buffered-bytes = 1000"),
    ],
    ids=["requests", "bytes"],
)
async def test_more_than_the_limit_of_open_requests_is_429(client: Client, words: str) -> None:
    prompt = "x" * 600
    asked, request = await client.begun(TEXT, prompt=prompt)
    answer = await client.post(TEXT, prompt=prompt)
    assert answer.status == 429
    assert int(answer.headers["Retry-After"]) >= 1
    assert words in answer.error["message"]
    request.accept()
    await client.finish(asked, request)
    await client.answered(TEXT, "x", prompt=prompt)


@with_settings(max_body_bytes=4096, max_buffered_bytes=16 * 4096)
async def test_uploads_that_stand_still_leave_room_for_a_request(client: Client) -> None:
    async def chunks() -> Any:
        yield json.dumps({"prompt": "x" * 1000}).encode()

    gateway = client.gateway
    idle = [await asyncio.open_connection("127.0.0.1", gateway.port) for _ in range(16)]
    for _, writer in idle:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n")
    await until(lambda: gateway.status().load == 16)
    answer, _ = await asyncio.gather(
        client.send("POST", TEXT, data=chunks()), client.tokenizer.answer("y")
    )
    assert answer.status == 200
    for _, writer in idle:
        writer.close()
    await until(lambda: gateway.status().load == 0)
    assert BUFFERED_BYTES._value.get() == 0


@with_settings(max_buffered_bytes=1000)
async def test_partial_bodies_count_while_they_are_read(client: Client) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", client.gateway.port)
    writer.write(HEAD + b"Content-Length: 900\r\n\r\n{" + b" " * 799)
    await until(lambda: BUFFERED_BYTES._value.get() == 800)
    assert "hold 800 bytes" in (await client.refused(429, TEXT, prompt="x" * 300))["message"]
    writer.close()


@pytest.mark.parametrize("prompt", ["x" * 3000, [1] * 60], ids=["text", "ids"])
async def test_of_an_accepted_request_only_the_ids_of_its_prompt_are_held(
    client: Client, prompt: Any
) -> None:
    asked, request = await client.begun(TEXT, prompt=prompt)
    sent = len(prompt) if isinstance(prompt, str) else 4 * len(prompt)
    assert BUFFERED_BYTES._value.get() == sent
    request.accept([1, 2, 3])
    await until(lambda: BUFFERED_BYTES._value.get() == 12)
    await client.finish(asked, request)


async def test_a_large_body_is_parsed_on_a_thread_and_refused_as_others_are(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def parse(*args: Any) -> Job:
        threads.append(threading.current_thread())
        return parse_completion(*args)

    monkeypatch.setattr(body, "MAX_INLINE_BYTES", 100)
    monkeypatch.setattr(endpoint, "TEXT", replace(generation.TEXT, parse=parse))
    _, request = await client.answered(TEXT, "y", prompt="x" * 200)
    assert request.prompt.tobytes() == b"x" * 200
    for prompt in ("x" * 200, "x"):
        assert (await client.refused(400, TEXT, prompt=prompt, n=0))["param"] == "n"
    *others, last = threads
    assert last is threading.main_thread()
    assert len(others) == 2
    assert last not in others


@with_settings(accept_timeout_s=0.05)
async def test_a_request_that_no_scheduler_accepts_is_503_and_cancelled(client: Client) -> None:
    asked, request = await client.begun()
    answer = await asked
    assert answer.status == 503
    assert "0.05 s" in answer.error["message"]
    assert int(answer.headers["Retry-After"]) >= 1
    cancelled = await client.tokenizer.cancelled.get()
    assert cancelled.keys[0].request == request.submit.request


async def test_without_a_tokenizer_everything_that_needs_one_is_503(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as gateway, client_of(gateway) as client:
        for method, path in [("POST", CHAT), ("POST", TEXT), ("GET", "/v1/models")]:
            answer = await client.send(method, path, json={})
            assert answer.status == 503
            assert answer.error["message"] == "no tokenizer is connected"
            assert int(answer.headers["Retry-After"]) >= 1


async def test_a_tokenizer_that_is_not_ready_makes_requests_503_with_its_reason(
    client: Client,
) -> None:
    client.tokenizer.state = State.NOT_READY
    client.tokenizer.link.send_status()
    await until(lambda: client.gateway.status().state == State.NOT_READY)
    assert "the water is cold" in (await client.refused(503, TEXT, prompt="a"))["message"]


@pytest.mark.parametrize("path", [TEXT, "/v1/models"])
async def test_a_request_waits_a_moment_for_a_mesh_that_is_coming(
    tmp_path: Path, path: str
) -> None:
    async with running_gateway(tmp_path, ready_wait_s=30) as gateway, client_of(gateway) as client:
        method = "GET" if path == "/v1/models" else "POST"
        asked = asyncio.create_task(client.send(method, path, json={"prompt": "a"}))
        await asyncio.sleep(0.1)
        assert not asked.done()
        assert (await client.get("/ready")).status == 503, "it is not ready, it only waits"
        async with fake_tokenizer(tmp_path) as tokenizer:
            if path == TEXT:
                await tokenizer.answer("x")
            assert (await asked).status == 200


@with_settings(replay_s=0)
async def test_losing_the_tokenizer_for_longer_than_a_replay_may_wait_is_503(
    client: Client,
) -> None:
    asked, _ = await client.accepted()
    await client.tokenizer.link.close("it swims away")
    answer = await asked
    assert (answer.status, answer.error["message"]) == (503, "no tokenizer is connected")


@pytest.mark.parametrize(
    "other",
    [
        ModelInfo(["cat"], "f2", vocab_size=9, max_model_len=8, created=1),
        msgspec.structs.replace(MODEL, max_model_len=63),
        msgspec.structs.replace(MODEL, defaults=SamplingDefaults(top_k=7)),
    ],
    ids=["model", "context", "defaults"],
)
async def test_a_tokenizer_with_another_model_or_other_settings_is_refused(
    tmp_path: Path, gateway: GatewayService, other: ModelInfo
) -> None:
    async with fake_tokenizer(tmp_path, "t2", other) as stranger:
        await until(lambda: not stranger.link.peers)
        assert len(gateway.link.peers) == 1


@with_settings(ready_wait_s=30)
@pytest.mark.parametrize("code", [NO_SCHEDULER, NO_WORKER])
async def test_a_request_during_a_loss_of_scheduler_or_worker_is_served_by_the_next(
    client: Client, code: str
) -> None:
    asked, refused = await client.begun()
    refused.fail(503, code, "it is not connected")
    again = await client.tokenizer.answer("carp")
    assert again.submit.attempt == 2
    assert (await asked).choices[0]["text"] == "carp"


async def test_a_request_without_a_scheduler_for_too_long_fails_with_the_reason(
    client: Client,
) -> None:
    asked, refused = await client.begun()
    refused.fail(503, NO_SCHEDULER, "it is not connected")
    answer = await asked
    assert (answer.status, answer.error["code"]) == (503, NO_SCHEDULER)

"""Every refusal has its status, and the same body."""

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
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
from tests.services.gateway.fakes import (
    MODEL,
    FakeTokenizer,
    fake_tokenizer,
    running_gateway,
    until,
)

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
MESSAGES: Any = [{"role": "user", "content": "Hi"}]


async def error_of(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The error object, after a check of its shape."""
    body = await response.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    assert isinstance(error["code"], str)
    assert len(response.headers["X-Request-Id"]) == 32
    return error


async def test_a_body_that_is_not_json_is_400(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, data=b"{") as response:
        assert response.status == 400
        assert (await error_of(response))["code"] == "invalid_json"


async def test_a_body_that_does_not_claim_to_be_json_is_415(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    text = json.dumps({"prompt": "a"})
    for path in (TEXT, CHAT):
        for wrong in ("text/plain", "application/x-www-form-urlencoded; charset=utf-8"):
            async with http.post(path, data=text, headers={"Content-Type": wrong}) as response:
                assert response.status == 415
                error = await error_of(response)
                assert error["code"] == "unsupported_media_type"
                assert wrong.partition(";")[0] in error["message"]
    assert tokenizer.submitted.empty()
    for right in ("application/json", "Application/JSON; charset=utf-8", ""):
        response, _ = await asyncio.gather(
            http.post(TEXT, data=text, headers={"Content-Type": right}), tokenizer.answer("y")
        )
        async with response:
            assert response.status == 200


async def test_no_answer_names_the_versions_behind_it(
    http: aiohttp.ClientSession, gateway: GatewayService
) -> None:
    for path in ("/health", "/no/such/path", TEXT):
        async with http.get(path) as response:
            assert response.headers["Server"] == "shoal"
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    writer.write(b"this is no HTTP\r\n\r\n")
    assert b"Server: shoal\r\n" in await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_a_wrong_value_is_400_and_named(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT, json={"messages": MESSAGES, "temperature": 3}) as response:
        assert response.status == 400
        assert await error_of(response) == {
            "message": "temperature is 3; expected float <= 2.0",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_value",
        }


async def test_a_parameter_that_is_not_built_is_400_and_named(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post(CHAT, json={"messages": MESSAGES, "best_of": 2}) as response:
        assert response.status == 400
        assert await error_of(response) == {
            "message": "best_of is 2, which is not supported (choices are not ranked here; n gives"
            " all of them); allowed: null or 1",
            "type": "invalid_request_error",
            "param": "best_of",
            "code": "unsupported_parameter",
        }


async def test_an_unknown_model_is_404_and_names_the_served_ones(
    http: aiohttp.ClientSession,
) -> None:
    async with http.post(CHAT, json={"model": "cat", "messages": MESSAGES}) as response:
        assert response.status == 404
        error = await error_of(response)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert all(name in error["message"] for name in ("cat", "fish", "org/fish"))


async def test_a_path_without_v1_is_404_with_a_hint(http: aiohttp.ClientSession) -> None:
    async with http.post(CHAT.removeprefix("/v1"), json={"messages": MESSAGES}) as response:
        assert response.status == 404
        assert (await error_of(response))["message"].endswith(f"; did you mean {CHAT}?")


async def test_an_unknown_route_is_404(http: aiohttp.ClientSession) -> None:
    async with http.get("/v2/nothing") as response:
        assert response.status == 404
        assert "/v2/nothing" in (await error_of(response))["message"]


async def test_a_wrong_method_is_405_and_names_the_allowed_ones(
    http: aiohttp.ClientSession,
) -> None:
    async with http.get(CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await error_of(response))["code"] == "method_not_allowed"


async def test_headers_beyond_the_limit_of_their_sum_are_431(
    http: aiohttp.ClientSession,
) -> None:
    headers = {f"A-{number}": "x" * 7000 for number in range(10)}
    async with http.post(TEXT, json={"prompt": "a"}, headers=headers) as response:
        assert response.status == 431
        assert "the limit is 65536" in (await error_of(response))["message"]


async def test_a_refusal_from_below_keeps_its_status_and_fields(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> None:
    posting = asyncio.create_task(
        http.post(CHAT, json={"messages": MESSAGES, "stream": True}).__aenter__()
    )
    request = await tokenizer.submitted.get()
    request.fail(429, "full", "no slot is free", param="messages", retry_after_s=2.5)
    response = await posting
    assert response.status == 429
    assert response.headers["Retry-After"] == "3"
    assert await error_of(response) == {
        "message": "no slot is free",
        "type": "some_error",
        "param": "messages",
        "code": "full",
    }


async def test_an_unexpected_exception_is_500_and_logged_with_the_request_id(
    http: aiohttp.ClientSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def explode(*_: object) -> None:
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(Completions, "serve", explode)
    async with http.post(CHAT, json={"messages": MESSAGES}) as response:
        assert response.status == 500
        error = await error_of(response)
    assert "secret" not in error["message"]
    assert response.headers["X-Request-Id"] in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_a_body_that_never_comes_is_408(
    http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = asyncio.Event()

    async def beginning() -> Any:
        yield b"{"
        await never.wait()

    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.01)
    async with http.post(TEXT, data=beginning()) as response:
        assert response.status == 408
        error = await error_of(response)
        assert error["code"] == "request_timeout"
        assert "did not come within 0.01 s" in error["message"]
    never.set()


class TestBodyLimit:
    LIMIT = 1000

    @pytest.fixture
    async def gateway(self, tmp_path: Path) -> Any:
        async with running_gateway(tmp_path, max_body_bytes=self.LIMIT) as gateway:
            yield gateway

    async def test_too_long_by_its_header_is_413_before_the_body_comes(
        self, gateway: GatewayService
    ) -> None:
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000000000\r\n"
        )
        for more in (b"\r\n", b"Expect: 100-continue\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(head + more)
            answer = await reader.readuntil(b"}}")
            writer.close()
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"1000000000000 bytes; the limit is 1000" in answer

    async def test_too_long_without_a_length_is_413(self, http: aiohttp.ClientSession) -> None:
        async def chunks() -> Any:
            for _ in range(3):
                yield b"x" * 500

        async with http.post(TEXT, data=chunks()) as response:
            assert response.status == 413
            assert (await error_of(response))["code"] == "body_too_large"

    async def test_too_long_when_unpacked_is_413(self, http: aiohttp.ClientSession) -> None:
        packed = gzip.compress(b"x" * 100_000)
        async with http.post(TEXT, data=packed, headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 413

    async def test_badly_packed_is_400(self, http: aiohttp.ClientSession) -> None:
        async with http.post(TEXT, data=b"abc", headers={"Content-Encoding": "gzip"}) as response:
            assert response.status == 400
            await error_of(response)

    async def test_a_client_that_expects_100_continue_gets_it(
        self, gateway: GatewayService
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
            b"Expect: 100-continue\r\n\r\n"
        )
        assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        writer.close()


async def test_more_than_the_limit_of_open_requests_is_429(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, max_open_requests=1) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            first = asyncio.create_task(http.post(TEXT, json={"prompt": "a"}).__aenter__())
            request = await tokenizer.submitted.get()
            async with http.post(TEXT, json={"prompt": "a"}) as response:
                assert response.status == 429
                assert int(response.headers["Retry-After"]) >= 1
                assert "max-open-requests = 1" in (await error_of(response))["message"]
            request.accept()
            request.finish()
            async with await first as response:
                assert response.status == 200


async def test_bodies_beyond_the_buffer_limit_are_429(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, max_buffered_bytes=1000) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            body = {"prompt": "x" * 600}
            first = asyncio.create_task(http.post(TEXT, json=body).__aenter__())
            request = await tokenizer.submitted.get()
            async with http.post(TEXT, json=body) as response:
                assert response.status == 429
                message = (await error_of(response))["message"]
                assert "max-buffered-bytes = 1000" in message
            request.accept()
            request.finish()
            async with await first as response:
                assert response.status == 200
            response, _ = await asyncio.gather(http.post(TEXT, json=body), tokenizer.answer("x"))
            async with response:
                assert response.status == 200


async def test_uploads_that_stand_still_leave_room_for_a_request(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = {"prompt": "x" * 1000}

    async def chunks() -> Any:
        yield json.dumps(body).encode()

    async with running_gateway(tmp_path, max_body_bytes=4096, max_buffered_bytes=16 * 4096) as it:
        await until(lambda: it.status().state == State.READY)
        idle = [await asyncio.open_connection("127.0.0.1", it.port) for _ in range(16)]
        for _, writer in idle:
            writer.write(head + b"1\r\n{\r\n")
        await until(lambda: it.status().load == 16)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{it.port}") as http:
            response, _ = await asyncio.gather(
                http.post(TEXT, data=chunks(), headers={"Content-Type": "application/json"}),
                tokenizer.answer("y"),
            )
            async with response:
                assert response.status == 200
        for _, writer in idle:
            writer.close()
        await until(lambda: it.status().load == 0)
        assert BUFFERED_BYTES._value.get() == 0


async def test_partial_bodies_count_while_they_are_read(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, max_buffered_bytes=1000) as it:
        await until(lambda: it.status().state == State.READY)
        _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{"
        )
        writer.write(b" " * 799)
        await until(lambda: BUFFERED_BYTES._value.get() == 800)
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{it.port}") as http,
            http.post(TEXT, json={"prompt": "x" * 300}) as response,
        ):
            assert response.status == 429
            assert "hold 800 bytes" in (await error_of(response))["message"]
        writer.close()


@pytest.mark.parametrize("prompt", ["x" * 3000, [1] * 60])
async def test_of_an_accepted_request_only_the_ids_of_its_prompt_are_held(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, prompt: Any
) -> None:
    posting = asyncio.create_task(http.post(TEXT, json={"prompt": prompt}).__aenter__())
    request = await tokenizer.submitted.get()
    sent = len(prompt) if isinstance(prompt, str) else 4 * len(prompt)
    assert BUFFERED_BYTES._value.get() == sent
    request.accept([1, 2, 3])
    await until(lambda: BUFFERED_BYTES._value.get() == 12)
    request.finish()
    (await posting).close()


async def test_a_large_body_is_parsed_on_a_thread_and_refused_as_others_are(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def parse(*args: Any) -> Job:
        threads.append(threading.current_thread())
        return parse_completion(*args)

    monkeypatch.setattr(body, "MAX_INLINE_BYTES", 100)
    monkeypatch.setattr(endpoint, "TEXT", replace(generation.TEXT, parse=parse))
    response, request = await asyncio.gather(
        http.post(TEXT, json={"prompt": "x" * 200}), tokenizer.answer("y")
    )
    async with response:
        assert response.status == 200
    assert request.prompt.tobytes() == b"x" * 200
    async with http.post(TEXT, json={"prompt": "x" * 200, "n": 0}) as response:
        assert response.status == 400
        assert (await error_of(response))["param"] == "n"
    async with http.post(TEXT, json={"prompt": "x", "n": 0}) as response:
        assert response.status == 400
    *others, last = threads
    assert last is threading.main_thread()
    assert len(others) == 2
    assert last not in others


async def test_a_request_that_no_scheduler_accepts_is_503_and_cancelled(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, accept_timeout_s=0.05) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with (
            aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
            http.post(TEXT, json={"prompt": "a"}) as response,
        ):
            assert response.status == 503
            assert "0.05 s" in (await error_of(response))["message"]
            assert int(response.headers["Retry-After"]) >= 1
        request = await tokenizer.submitted.get()
        assert (await tokenizer.cancelled.get()).keys[0].request == request.submit.request


async def test_without_a_tokenizer_everything_that_needs_one_is_503(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        for method, path in [("POST", CHAT), ("POST", TEXT), ("GET", "/v1/models")]:
            async with http.request(method, path, json={}) as response:
                assert response.status == 503
                assert (await error_of(response))["message"] == "no tokenizer is connected"
                assert int(response.headers["Retry-After"]) >= 1


async def test_with_a_tokenizer_that_is_not_ready_requests_are_503_with_its_reason(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer, gateway: GatewayService
) -> None:
    tokenizer.state = State.NOT_READY
    tokenizer.link.send_status()
    await until(lambda: gateway.status().state == State.NOT_READY)
    async with http.post(TEXT, json={"prompt": "a"}) as response:
        assert response.status == 503
        assert "the water is cold" in (await error_of(response))["message"]


@pytest.mark.parametrize("path", [TEXT, "/v1/models"])
async def test_a_request_waits_a_moment_for_a_mesh_that_is_coming(
    tmp_path: Path, path: str
) -> None:
    async with (
        running_gateway(tmp_path, ready_wait_s=30) as gateway,
        aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http,
    ):
        method = "GET" if path == "/v1/models" else "POST"
        posting = asyncio.create_task(http.request(method, path, json={"prompt": "a"}).__aenter__())
        await asyncio.sleep(0.1)
        assert not posting.done()
        async with http.get("/ready") as response:
            assert response.status == 503, "it is not ready, it only waits"
        async with fake_tokenizer(tmp_path) as tokenizer:
            if path == TEXT:
                await tokenizer.answer("x")
            async with await posting as response:
                assert response.status == 200


async def test_losing_the_tokenizer_for_longer_than_a_replay_may_wait_is_503(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with running_gateway(tmp_path, replay_s=0) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            posting = asyncio.create_task(http.post(TEXT, json={"prompt": "a"}).__aenter__())
            await tokenizer.accepted()
            await tokenizer.link.close("it swims away")
            response = await posting
            assert response.status == 503
            assert (await error_of(response))["message"] == "no tokenizer is connected"


@pytest.mark.parametrize(
    "other",
    [
        ModelInfo(["cat"], "f2", vocab_size=9, max_model_len=8, created=1),
        msgspec.structs.replace(MODEL, max_model_len=63),
        msgspec.structs.replace(MODEL, defaults=SamplingDefaults(top_k=7)),
    ],
)
async def test_a_tokenizer_with_another_model_or_other_settings_is_refused(
    tmp_path: Path, gateway: GatewayService, other: ModelInfo
) -> None:
    async with fake_tokenizer(tmp_path, "t2", other) as stranger:
        await until(lambda: not stranger.link.peers)
        assert len(gateway.link.peers) == 1


@asynccontextmanager
async def asked_without_scheduler(
    mesh_dir: Path, tokenizer: FakeTokenizer, ready_wait_s: float, code: str = NO_SCHEDULER
) -> AsyncIterator[asyncio.Task[aiohttp.ClientResponse]]:
    """A request refused because the scheduler, or its last worker, has just been lost."""
    async with running_gateway(mesh_dir, ready_wait_s=ready_wait_s) as gateway:
        await until(lambda: gateway.status().state == State.READY)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{gateway.port}") as http:
            asked = asyncio.create_task(http.post(TEXT, json={"prompt": "a"}).__aenter__())
            refused = await tokenizer.submitted.get()
            refused.fail(503, code, "it is not connected")
            yield asked


@pytest.mark.parametrize("code", [NO_SCHEDULER, NO_WORKER])
async def test_a_request_during_a_loss_of_scheduler_or_worker_is_served_by_the_next(
    tmp_path: Path, tokenizer: FakeTokenizer, code: str
) -> None:
    async with asked_without_scheduler(tmp_path, tokenizer, ready_wait_s=30, code=code) as asked:
        again = await tokenizer.answer("carp")
        assert again.submit.attempt == 2
        async with await asked as response:
            assert (await response.json())["choices"][0]["text"] == "carp"


async def test_a_request_without_a_scheduler_for_too_long_fails_with_the_reason(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    async with (
        asked_without_scheduler(tmp_path, tokenizer, ready_wait_s=0) as asked,
        await asked as response,
    ):
        assert response.status == 503
        assert (await error_of(response))["code"] == NO_SCHEDULER

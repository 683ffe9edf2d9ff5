"""Every HTTP fault has its own status and our error object, and nothing of the request appears in
the answer or the log."""

import asyncio
import json
import logging
from typing import Any

import pytest

from services.gateway.http.head_parser import MAX_HEAD_BYTES, MAX_HEADERS, HeadParser
from services.gateway.service import GatewayService
from tests.services.gateway.client import TEXT, Client, raw_answer
from tests.services.gateway.fakes import until

SECRET = b"sk-secret"
HOST = b"Host: localhost\r\n"
KEY = b"Authorization: Bearer " + SECRET


def get(more: bytes = b"", line: bytes = b"GET /ping HTTP/1.1", host: bytes = HOST) -> bytes:
    return b"%b\r\n%b%b\r\n%b\r\n" % (line, host, KEY, more)


def post(more: bytes, body: bytes = b"", path: bytes = b"/v1/completions") -> bytes:
    return get(more, b"POST %b HTTP/1.1" % path) + body


def filled(num_bytes: int) -> bytes:
    return b"X-Api-Key: " + SECRET + b"x" * num_bytes + b"\r\n"


FAULTS: dict[str, tuple[bytes, int, str]] = {
    "no HTTP": (b"\x00\x01" + SECRET + b"\r\n\r\n", 400, "bad_request"),
    "TLS": (b"\x16\x03\x01" + SECRET, 400, "bad_request"),
    "method": (get(line=b"FETCH /ping HTTP/1.1"), 501, "not_implemented"),
    "lower case": (get(line=b"get /ping HTTP/1.1"), 501, "not_implemented"),
    "HTTP/3": (get(line=b"GET /ping HTTP/3.0"), 505, "http_version_not_supported"),
    "HTTP/2": (get(line=b"GET /ping HTTP/2.0"), 505, "http_version_not_supported"),
    "HTTP/0.9": (get(line=b"GET /ping HTTP/0.9"), 505, "http_version_not_supported"),
    "preface": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "http_version_not_supported"),
    "word": (get(line=b"GET /ping HTTX/1.1"), 400, "bad_request"),
    "no host": (get(host=b""), 400, "bad_request"),
    "two hosts": (get(HOST), 400, "bad_request"),
    "URL": (get(line=b"GET http://[::1" + SECRET + b" HTTP/1.1"), 400, "bad_request"),
    "long URL": (
        get(line=b"GET /?key=" + SECRET + b"x" * 9000 + b" HTTP/1.1"),
        414,
        "uri_too_long",
    ),
    "long name": (get(b"x" * MAX_HEAD_BYTES + b": a\r\n"), 431, "request_header_fields_too_large"),
    "long header": (get(filled(MAX_HEAD_BYTES)), 431, "request_header_fields_too_large"),
    "long headers": (get(filled(9000) * 8), 431, "request_header_fields_too_large"),
    "many headers": (get(b"A: b\r\n" * MAX_HEADERS), 431, "request_header_fields_too_large"),
    "name": (get(b"A\x01: " + SECRET + b"\r\n"), 400, "bad_request"),
    "value": (get(b"A: " + SECRET + b"\x00\r\n"), 400, "bad_request"),
    "length": (post(b"Content-Length: " + SECRET + b"\r\n"), 400, "bad_request"),
    "two lengths": (post(b"Content-Length: 1\r\nContent-Length: 2\r\n"), 400, "bad_request"),
    "transfer": (post(b"Transfer-Encoding: " + SECRET + b"\r\n"), 400, "bad_request"),
    "chunk": (post(b"Transfer-Encoding: chunked\r\n", SECRET + b"\r\n"), 400, "bad_request"),
    "expectation": (get(b"Expect: x\r\n"), 417, "expectation_failed"),
    "its bytes": (get(b"Expect: \xff\r\n"), 417, "expectation_failed"),
    "nowhere": (get(b"Expect: \xff\r\n", b"GET /no HTTP/1.1"), 417, "expectation_failed"),
    "type": (post(b"Content-Type: text/plain\r\n"), 415, "unsupported_media_type"),
    "its bytes, too": (post(b"Content-Type: \xff/\xfe\r\n"), 415, "unsupported_media_type"),
    "type of a form": (
        post(b"Content-Type: \xff/\xfe\r\n", path=b"/v1/files"),
        404,
        "batches_disabled",
    ),
    "coding": (post(b"Content-Encoding: lz4\r\n"), 415, "unsupported_media_type"),
    "its bytes, as well": (post(b"Content-Encoding: \xff\r\n"), 415, "unsupported_media_type"),
    "two codings": (post(b"Content-Encoding: gzip, gzip\r\n"), 415, "unsupported_media_type"),
    "coding without a library": (post(b"Content-Encoding: br\r\n"), 415, "unsupported_media_type"),
    "packed": (
        post(b"Content-Encoding: gzip\r\nContent-Length: 9\r\n", SECRET),
        400,
        "invalid_value",
    ),
    "half packed": (
        post(b"Content-Encoding: deflate\r\nContent-Length: 3\r\n", b"x\x9c\x03"),
        400,
        "bad_request",
    ),
}


async def answer_to(gateway: GatewayService, *sent: bytes) -> tuple[int, dict[str, str], Any]:
    """The status, the headers and the error of the answer."""
    answer = await raw_answer(gateway, *sent, end=b"}}", pause_s=0.05)
    assert SECRET not in answer
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert headers["Server"] == "shoal"
    return int(status.split()[1]), headers, json.loads(body)["error"]


async def test_each_fault_has_its_status_and_our_error_object(
    gateway: GatewayService, caplog: pytest.LogCaptureFixture, subtests: pytest.Subtests
) -> None:
    caplog.set_level(logging.DEBUG)
    for fault, (sent, expected, code) in FAULTS.items():
        with subtests.test(fault):
            status, headers, error = await answer_to(gateway, sent)
            assert (status, error["code"]) == (expected, code)
            assert (error["type"], error["param"]) == ("invalid_request_error", None)
            if status == 415:
                hint = "Accept" if "Content-Type" in error["message"] else "Accept-Encoding"
                assert headers[hint].startswith(("application/json", "gzip, deflate"))
    assert SECRET.decode() not in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("num_bytes", [8300, 20_000, 60_000])
async def test_a_long_token_is_served(client: Client, num_bytes: int) -> None:
    answer = await client.get("/v1/models", Authorization="Bearer " + "x" * num_bytes)
    assert answer.status == 200


async def test_a_head_that_does_not_end_is_refused_while_it_comes(gateway: GatewayService) -> None:
    piece = filled(20_000)
    status, _, error = await answer_to(gateway, get()[:-2], piece, piece, piece, piece)
    assert (status, error["code"]) == (431, "request_header_fields_too_large")


async def test_heads_are_counted_one_by_one(gateway: GatewayService) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    for _ in range(5):
        writer.write(get()[:-2] + filled(30_000))
        await asyncio.sleep(0.01)
        writer.write(b"\r\n")
        assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_body_is_no_part_of_a_head(client: Client) -> None:
    async def chunks() -> Any:
        yield b'{"prompt": "a", "user": "'
        for _ in range(20):
            yield b"x" * 10_000
            await asyncio.sleep(0.001)
        yield b'"}'

    sending = client.send("POST", TEXT, data=chunks())
    answer, _ = await asyncio.gather(sending, client.tokenizer.answer("y"))
    assert answer.status == 200


async def test_a_broken_chunked_body_has_one_answer_at_once(gateway: GatewayService) -> None:
    """A proxy would take a second answer for that of its next request."""
    sent = post(b"Transfer-Encoding: chunked\r\n", b"2\r\n{}\r\n"), SECRET + b"\r\n"
    status, _, error = await answer_to(gateway, *sent)
    assert (status, error["code"]) == (400, "invalid_value")
    assert "chunk size" in error["message"]
    assert (await raw_answer(gateway, *sent, pause_s=0.05)).count(b"HTTP/1.") == 1


class TestWithoutMemory:
    @pytest.fixture
    def is_full(self, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
        """True if incoming data finds no memory."""
        is_full, fed = [False], HeadParser._fed

        def feed(parser: HeadParser, data: bytes) -> Any:
            if is_full[0]:
                raise MemoryError
            return fed(parser, data)

        monkeypatch.setattr(HeadParser, "_fed", feed)
        return is_full

    async def test_a_connection_ends_and_no_other(
        self, gateway: GatewayService, is_full: list[bool]
    ) -> None:
        errors: list[Any] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        other = await asyncio.open_connection("127.0.0.1", gateway.port)
        is_full[0] = True
        writer.write(get())
        assert await reader.read() == b""
        is_full[0] = False
        other[1].write(get())
        assert (await other[0].readuntil(b"}")).startswith(b"HTTP/1.1 200")
        assert not errors
        for each in (writer, other[1]):
            each.close()

    async def test_a_body_that_cannot_be_held_is_503(
        self, gateway: GatewayService, is_full: list[bool]
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(post(b"Content-Length: 100\r\n", b"{"))
        await until(lambda: gateway.status().load == 1)
        is_full[0] = True
        writer.write(b" " * 99)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"out_of_memory"' in answer
        assert b"Retry-After: " in answer

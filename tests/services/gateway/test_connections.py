"""Idle or unread connections; more of them than files."""

import asyncio
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.gateway.http.connection import ReadingCheck
from services.gateway.metrics import CONNECTIONS, SHED_CONNECTIONS, SLOW_CLIENTS
from services.gateway.service import GatewayService
from shared.wire.messages import RequestKey
from tests.services.gateway.client import TEXT, Client, raw_answer, raw_get, raw_post, with_settings
from tests.services.gateway.fakes import FakeTokenizer, Submitted, running_gateway, until
from tests.services.gateway.process import gateway_process

NUM_FILES = 1024
PING = raw_get("/ping")


def connect(stack: ExitStack, port: int, num: int) -> None:
    for _ in range(num):
        stack.enter_context(socket.create_connection(("127.0.0.1", port)))


def num_shed(reason: str) -> float:
    return SHED_CONNECTIONS.labels(reason)._value.get()


async def begun(
    http: aiohttp.ClientSession, tokenizer: FakeTokenizer
) -> tuple[aiohttp.ClientResponse, Submitted]:
    """A stream with its first text under way."""
    body = {"prompt": "a", "stream": True}
    posting = asyncio.create_task(http.post(TEXT, json=body).__aenter__())
    request = await tokenizer.accepted()
    request.text("x")
    return await posting, request


async def test_more_silent_connections_than_files_neither_end_nor_starve_a_gateway(
    tmp_path: Path, tokenizer: FakeTokenizer
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    async with (
        gateway_process(tmp_path, num_files=NUM_FILES) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        stream, request = await begun(http, tokenizer)
        with ExitStack() as stack:
            # Not on the loop, which serves the tokenizer's heartbeats.
            await asyncio.to_thread(connect, stack, gateway.port, NUM_FILES + 76)
            for _ in range(3):
                other, answered = await begun(http, tokenizer)
                answered.finish()
                assert (await other.text()).endswith("data: [DONE]\n\n")
            request.finish()
            assert (await stream.text()).endswith("data: [DONE]\n\n")
            assert gateway.process.returncode is None
            assert await gateway.metric("shoal_shed_connections_total") >= 76
            assert await gateway.metric("shoal_connections") < NUM_FILES


@contextmanager
def no_gaps() -> Iterator[None]:
    """Holds files open so that the next ones get consecutive numbers."""
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    held = [os.dup(0)]
    while held[-1] < highest:
        held.append(os.dup(0))
    yield
    for number in held:
        os.close(number)


@pytest.mark.parametrize(("share", "is_answered"), [(6, True), (12, False)])
async def test_where_all_connections_have_a_request_a_new_one_is_refused(
    gateway: GatewayService,
    tokenizer: FakeTokenizer,
    monkeypatch: pytest.MonkeyPatch,
    share: int,
    is_answered: bool,
) -> None:
    """One in ``share`` files is free."""
    with no_gaps(), socket.create_connection(("127.0.0.1", gateway.port)) as busy:
        busy.sendall(raw_post(prompt="a"))
        request = await tokenizer.accepted()
        limit = (busy.fileno() + 4) * share // (share - 1)
        before = num_shed("refused"), num_shed("closed")
        monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
        answer = await raw_answer(gateway, raw_post(prompt="b"))
        refused, closed = num_shed("refused") - before[0], num_shed("closed") - before[1]
        assert (refused, closed) == (is_answered, not is_answered)
        if is_answered:
            assert answer.startswith(b"HTTP/1.1 503")
            for words in (b"Connection: close", b"Retry-After", b"RLIMIT_NOFILE = %d" % limit):
                assert words in answer
        request.finish()
        answer = await asyncio.to_thread(busy.recv, 12)
        assert answer == b"HTTP/1.1 200"


@pytest.mark.parametrize(
    "sent", [b"", b"POST /v1/compl", b"POST / HTTP/1.1\r\nHost: localhost\r\n"]
)
async def test_a_request_whose_head_does_not_come_ends_its_connection(
    tmp_path: Path, sent: bytes
) -> None:
    before = num_shed("late")
    async with running_gateway(tmp_path, header_timeout_s=0.05) as gateway:
        assert await raw_answer(gateway, sent) == b""
    assert num_shed("late") == before + 1


async def test_a_later_request_has_a_deadline_for_its_head_too(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, header_timeout_s=0.3) as gateway:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        for _ in range(3):
            writer.write(PING)
            assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(0.2)  # together longer than the deadline of one head
        writer.write(b"G")
        assert await reader.read() == b""
        writer.close()


async def test_a_connection_without_a_request_is_closed(tmp_path: Path) -> None:
    async with running_gateway(tmp_path, keep_alive_timeout_s=0.05) as gateway:
        assert (await raw_answer(gateway, PING)).startswith(b"HTTP/1.1 200")


@with_settings(header_timeout_s=0.05, keep_alive_timeout_s=0.05)
async def test_a_request_longer_than_all_deadlines_is_answered(client: Client) -> None:
    asked, request = await client.accepted()
    await asyncio.sleep(0.2)
    await client.finish(asked, request)


class TestOfAClientThatDoesNotRead:
    @pytest.fixture
    async def client(self) -> AsyncIterator[socket.socket]:
        """With small buffers for unread data."""
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.setblocking(False)
            yield client

    @pytest.mark.parametrize(
        "path",
        [
            *("/", "/v1/models"),
            *(pytest.param(path, marks=pytest.mark.slow) for path in ("/ping", "/health", "/no")),
        ],
    )
    async def test_its_connection_is_cut_off_whoever_writes(
        self, tmp_path: Path, client: socket.socket, path: str
    ) -> None:
        loop, before = asyncio.get_running_loop(), SLOW_CLIENTS._value.get()
        settings: Any = {"api_key": ["k"], "slow_client_s": 0.05}  # /v1/models is a 401
        async with running_gateway(tmp_path, **settings) as gateway:
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            sending = asyncio.create_task(loop.sock_sendall(client, raw_get(path) * 20_000))
            await until(lambda: SLOW_CLIENTS._value.get() == before + 1)
            await until(lambda: CONNECTIONS._value.get() == 0)
            sending.cancel()
            await asyncio.wait([sending])

    async def test_it_is_cut_off_where_its_connection_is_to_be_closed(
        self, tmp_path: Path, client: socket.socket
    ) -> None:
        loop, before = asyncio.get_running_loop(), SLOW_CLIENTS._value.get()
        settings: Any = {"slow_client_s": 1, "keep_alive_timeout_s": 0.2}
        async with running_gateway(tmp_path, **settings) as gateway:
            await loop.sock_connect(client, ("127.0.0.1", gateway.port))
            await until(lambda: CONNECTIONS._value.get() == 1)
            [connection] = gateway._runner.server.connections
            connection.transport.set_write_buffer_limits(high=1 << 30)  # no drain waits
            await loop.sock_sendall(client, raw_get("/metrics") * 200)
            await until(lambda: connection.transport is None)
            await until(lambda: CONNECTIONS._value.get() == 0)
            assert SLOW_CLIENTS._value.get() == before + 1


class TestReadingCheck:
    def test_one_that_reads_on_is_never_late_however_much_is_unread(self) -> None:
        check, step = ReadingCheck(10), 64 << 10
        assert not any(check.is_late(now_s * 1000, 0, now_s) for now_s in range(100))
        check = ReadingCheck(10)
        for now_s in range(100):
            assert not check.is_late(10**9, 10**9 - now_s * step // 9, now_s)

    @pytest.mark.parametrize("read_in_1_s", [0, 1, 1000])
    def test_one_that_reads_too_little_is_late_after_the_period(self, read_in_1_s: int) -> None:
        check = ReadingCheck(10)
        assert not any(check.is_late(5000 * s, 5000 * s - read_in_1_s * s, s) for s in range(1, 11))
        assert check.is_late(60_000, 60_000 - 11 * read_in_1_s, 11)


class TestOfAClientThatSendsNoMore:
    @pytest.mark.parametrize("is_stream", [False, True])
    async def test_it_gets_its_whole_answer(
        self, tmp_path: Path, tokenizer: FakeTokenizer, is_stream: bool
    ) -> None:
        async with gateway_process(tmp_path) as gateway:
            reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
            writer.write(raw_post(prompt="a", stream=is_stream))
            writer.write_eof()
            request = await tokenizer.submitted.get()
            await asyncio.sleep(0.3)  # an end of its sending would be noticed by now
            request.accept()
            request.text("ca")
            await asyncio.sleep(0.3)
            request.text("rp")
            request.finish()
            answer = await reader.read()
            writer.close()
            assert b"HTTP/1.1 200 OK" in answer
            assert (b'"text":"ca"' if is_stream else b'"text":"carp"') in answer
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") == is_stream
            assert tokenizer.cancelled.empty()

    @pytest.mark.parametrize(
        ("sent", "num_answers"),
        [(PING * 3, 3), (b"", 0), (b"GET / HT", 0), (raw_post(prompt="abc")[:-3], 0)],
        ids=["pipelined", "nothing", "part of a head", "part of a body"],
    )
    async def test_whole_requests_have_answers(
        self, gateway: GatewayService, sent: bytes, num_answers: int
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(sent)
        writer.write_eof()
        answer = await reader.read()
        assert answer.count(b"HTTP/1.1 200") == num_answers
        assert bool(answer) == bool(num_answers)
        writer.close()
        await until(lambda: gateway.status().load == 0)

    async def test_a_client_that_has_left_cancels_its_request(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with gateway_process(tmp_path) as gateway:
            for is_stream, is_accepted in product((False, True), (False, True)):
                client = socket.create_connection(("127.0.0.1", gateway.port))
                client.sendall(raw_post(prompt="a", stream=is_stream))
                request = await tokenizer.submitted.get()
                if is_accepted:
                    request.accept()
                    request.text("x")
                    await asyncio.sleep(0.1)
                client.close()
                async with asyncio.timeout(10):
                    cancel = await tokenizer.cancelled.get()
                assert cancel.keys == [RequestKey(*request.key)]
            await until_idle(gateway.url)

    @pytest.mark.slow
    async def test_one_that_leaves_later_is_noticed_by_the_next_comment(
        self, tmp_path: Path, tokenizer: FakeTokenizer
    ) -> None:
        async with gateway_process(tmp_path, "--stream-heartbeat-s", "0.5") as gateway:
            for is_stream in (False, True):
                client = socket.create_connection(("127.0.0.1", gateway.port))
                client.sendall(raw_post(prompt="a", stream=is_stream))
                client.shutdown(socket.SHUT_WR)
                request = await tokenizer.accepted()
                await asyncio.sleep(0.7)
                assert tokenizer.cancelled.empty()
                client.close()
                async with asyncio.timeout(10):
                    cancel = await tokenizer.cancelled.get()
                assert cancel.keys == [RequestKey(*request.key)]

    async def test_of_http_1_0_it_is_taken_for_one_that_has_left(
        self, gateway: GatewayService, tokenizer: FakeTokenizer
    ) -> None:
        """Nothing can be written to it before its answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
        writer.write(raw_post(version="1.0", prompt="a"))
        request = await tokenizer.accepted()
        writer.write_eof()
        assert (await tokenizer.cancelled.get()).keys == [RequestKey(*request.key)]
        assert await reader.read() == b""
        writer.close()


async def until_idle(url: str) -> None:
    async with asyncio.timeout(20), aiohttp.ClientSession(url) as http:
        while True:
            async with http.get("/load") as response:
                if (await response.json())["server_load"] == 0:
                    return
            await asyncio.sleep(0.05)

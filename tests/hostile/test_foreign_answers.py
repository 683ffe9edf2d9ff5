"""Behind proxies with persistent connections, nobody gets another client's answer."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from tests.hostile.proxies import PROXIES, Proxy, nginx, running
from tests.services.gateway.fakes import fake_tokenizer
from tests.services.gateway.process import gateway_process

KEY = "key-of-mallory"
PONG = b'{"status":"alive"}'
NUM_ASKING = 4
FOREIGN = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nX-Request-Id: foreign\r\n\r\nforeign"


@dataclass
class Answers:
    """Answers of other clients: own ones, foreign ones, and refusals by status; ``num_heads``
    counts HEADs answered meanwhile."""

    own: int = 0
    foreign: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    num_heads: int = 0

    def note(self, status: int, is_own: bool) -> None:
        if status != 200:
            self.refused[status] += 1
        elif is_own:
            self.own += 1
        else:
            self.foreign += 1

    @property
    def total(self) -> int:
        return self.own + self.foreign + self.refused.total()


class Client:
    """A connection to the proxy, reopened after a close."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, method: str, path: str, name: str) -> tuple[int, str, bytes]:
        """The status, the id and the body of the answer to a request with the id ``name``."""
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: {name}\r\n"
            f"Authorization: Bearer {KEY}\r\n\r\n".encode()
        )
        try:
            return await self._answer(has_body=method != "HEAD")
        except (asyncio.IncompleteReadError, ConnectionError):
            self.close()
            return 0, "", b""

    async def _answer(self, *, has_body: bool) -> tuple[int, str, bytes]:
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode()
        status, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        length = int(headers.get("content-length", 0)) if has_body else 0
        body = await self._reader.readexactly(length)
        if headers.get("connection") == "close":
            self.close()
        return int(status.split()[1]), headers.get("x-request-id", ""), body

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


async def ask_on(port: int, number: int, num_answers: int, answers: Answers) -> None:
    client = Client(port)
    while answers.total < num_answers:
        name = f"client-{number}-{answers.total}"
        status, found, body = await client.ask("GET", "/ping", name)
        answers.note(status, (found, body) == (name, PONG))
    client.close()


async def attack(port: int, file_id: str, answers: Answers) -> None:
    client = Client(port)
    try:
        while True:
            status, _, _ = await client.ask("HEAD", f"/v1/files/{file_id}/content", "mallory")
            answers.num_heads += status == 200
    finally:
        client.close()


async def uploaded(url: str) -> str:
    """The id of a file with this number of answers."""
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", FOREIGN * 20, filename="answers.jsonl")
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/files", data=form, headers=headers) as response,
    ):
        file_id: str = (await response.json())["id"]
        return file_id


async def answers_behind(proxy: Proxy, folder: Path, num_answers: int) -> Answers:
    """Answers of clients that run next to one sending HEAD for its file."""
    answers, flags = Answers(), ("--api-key", KEY, "--batch-dir", str(folder / "batches"))
    async with (
        fake_tokenizer(folder),
        gateway_process(folder, *flags) as gateway,
        running(proxy, folder, gateway.port) as port,
    ):
        attacking = asyncio.create_task(attack(port, await uploaded(gateway.url), answers))
        async with asyncio.TaskGroup() as asking:
            for number in range(NUM_ASKING):
                asking.create_task(ask_on(port, number, num_answers, answers))
        assert not attacking.done(), "else nobody has attacked"
        attacking.cancel()
        await asyncio.wait([attacking])
    return answers


def check(answers: Answers) -> None:
    assert answers.foreign == 0, answers
    assert not answers.refused, answers
    assert answers.num_heads > answers.total // 100, answers


async def test_no_answer_is_foreign(tmp_path: Path) -> None:
    check(await answers_behind(nginx, tmp_path, 500))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("proxy", PROXIES)
async def test_no_answer_of_many_is_foreign(tmp_path: Path, proxy: Proxy) -> None:
    """100,000 in all, a third behind each of three proxies with persistent connections to the
    gateway."""
    answers = await answers_behind(proxy, tmp_path, 34_000)
    print(f"\n{proxy.__name__}: {answers}")
    check(answers)

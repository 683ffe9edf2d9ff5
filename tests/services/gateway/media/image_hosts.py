"""A host of images, good and bad, and names that lead to it."""

import asyncio
import gzip
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from tests.services.gateway.media.asking import FILE


def reply(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    lines = [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode() + body


def whole(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    return reply(body, status, Content_Length=str(len(body)), **headers)


async def drip(writer: asyncio.StreamWriter, piece: bytes, pause_s: float) -> None:
    while True:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(pause_s)


class ImageHost:
    """``answers`` has the bytes for a path, or a function that writes them. ``heads`` are the
    requests that came."""

    def __init__(self) -> None:
        self.port = 0
        self.heads: list[str] = []
        self.answers: dict[str, bytes | Callable[[asyncio.StreamWriter], Any]] = {
            "/a.png": whole(FILE, Content_Type="text/html"),
            "/b.png": whole(b"other", Content_Type="image/png"),
            "/chunked": reply(b"5\r\nother\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
            "/until-close": reply(b"other"),
            "/missing": whole(b"the secret of another service", "404 Not Found"),
            "/failed": whole(b"the secret of another service", "500 Internal Server Error"),
            "/part": whole(FILE[:4], "206 Partial Content"),
            "/none": whole(b"", "204 No Content"),
            "/empty": whole(b""),
            "/short": reply(FILE, Content_Length="2000"),
            "/half-chunk": reply(b"ff\r\nother", Transfer_Encoding="chunked"),
            "/odd-chunk": reply(b"zz\r\nother\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
            "/large": reply(FILE, Content_Length=str(1 << 40)),
            "/negative": reply(FILE, Content_Length="-5"),
            "/two-lengths": reply(FILE, Content_Length="5\r\nContent-Length: 6"),
            "/gzip": whole(gzip.compress(bytes(1 << 20)), Content_Encoding="gzip"),
            "/br": whole(b"?", Content_Encoding="br"),
            "/header-bomb": reply(b"", X_Long="a" * (1 << 20)),
            "/headers": b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 100_000,
            "/ssh": b"SSH-2.0-OpenSSH_9.0\r\n" + b"secret" * 10,
            "/nothing": b"",
            "/silent": lambda writer: asyncio.sleep(60),
            "/slow-head": lambda writer: self._then(
                writer, b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.1
            ),
            "/slow": lambda writer: self._then(writer, reply(b""), b"a", 0.1),
            "/endless": lambda writer: self._then(writer, reply(b""), bytes(1 << 16), 0),
            "/endless-chunks": lambda writer: self._then(
                writer, reply(b"", Transfer_Encoding="chunked"), b"5\r\nother\r\n" * 1000, 0
            ),
            "/loop": whole(b"", "302 Found", Location="/loop"),
            "/nowhere": whole(b"", "302 Found"),
            "/odd-redirect": whole(b"", "302 Found", Location="http://[::bad/"),
            "/to-file": whole(b"", "302 Found", Location="file:///etc/passwd"),
            "/to-metadata": whole(b"", "302 Found", Location="http://169.254.169.254/latest/"),
            "/to-private": whole(b"", "307 Temporary Redirect", Location="http://10.0.0.1/a.png"),
            "/to-other-host": whole(b"", "302 Found", Location="//evil.example/a.png"),
            "/to-other-port": whole(b"", "302 Found", Location="http://images.example:1/a.png"),
            "/to-user": whole(b"", "302 Found", Location="//me:secret@images.example/a.png"),
            "/redirect": whole(b"no image", "301 Moved Permanently", Location="/redirect-2"),
            "/redirect-2": whole(b"", "308 Permanent Redirect", Location="redirect-3"),
            "/redirect-3": whole(b"", "303 See Other", Location="a.png?b=c%2Fd#e"),
        }

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["ImageHost"]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _then(
        self, writer: asyncio.StreamWriter, head: bytes, piece: bytes, pause_s: float
    ) -> None:
        writer.write(head)
        await drip(writer, piece, pause_s)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.heads.append(head)
            answer = self.answers[head.split(" ")[1].partition("?")[0]]
            if isinstance(answer, bytes):
                writer.write(answer)
                await writer.drain()
            else:
                async with asyncio.timeout(30):
                    await answer(writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


class Names:
    """A name service: ``addresses`` by host, each list used up until its last entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.addresses: dict[str, list[list[str]]] = {}
        self.asked: list[str] = []
        self._silent: dict[str, threading.Event] = {}
        self._real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)

    @contextmanager
    def silent(self, host: str) -> Iterator[None]:
        """Lookups of ``host`` have no answer until the end."""
        self._silent[host] = threading.Event()
        try:
            yield
        finally:
            self._silent[host].set()

    def _resolve(self, host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        if host in self._silent:
            self.asked.append(host)
            self._silent[host].wait()
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        if host not in self.addresses:
            return self._real(host, port, *args, **kwargs)
        self.asked.append(host)
        answers = self.addresses[host]
        found = answers.pop(0) if len(answers) > 1 else answers[0]
        if not found:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        kinds = {each: socket.AF_INET6 if ":" in each else socket.AF_INET for each in found}
        return [(kinds[each], socket.SOCK_STREAM, 6, "", (each, port)) for each in found]

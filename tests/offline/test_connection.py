"""Replies of servers that Shoal would not give, from a fake."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shoal import LLM

SHOAL = b'{"object": "list", "data": [{"id": "fish", "owned_by": "shoal"}]}'
VLLM = b'{"object": "list", "data": [{"id": "fish", "owned_by": "vllm"}]}'


@contextmanager
def server(models: bytes, status: int = 200, reply: bytes = b"{}") -> Iterator[str]:
    """A server with ``models`` that answers each request with ``reply``; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(200, models)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._answer(status, reply)

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize("models", [VLLM, b"[]", b"\xff", b"<html>"])
def test_a_server_of_another_kind_is_a_connection_error(models: bytes):
    with server(models) as url, pytest.raises(ConnectionError, match="a server of another kind"):
        LLM(url=url)


@pytest.mark.parametrize(
    ("status", "reply", "kind", "text"),
    [
        (400, b'{"error": {"message": "no fish"}}', ValueError, r"prompts\[0\]: no fish$"),
        (404, b"<html>", ValueError, r"prompts\[0\]: <html>$"),
        (500, b'{"error": "no sea"}', RuntimeError, r"prompts\[0\]: no sea$"),
        (500, b"[]", RuntimeError, r"prompts\[0\]: \[\]$"),
        (401, b"{}", RuntimeError, "refuses the API key"),
    ],
)
def test_the_status_decides_the_kind_of_the_error(
    status: int, reply: bytes, kind: type[Exception], text: str
):
    with server(SHOAL, status, reply) as url, LLM(url=url) as llm, pytest.raises(kind, match=text):
        llm.generate("a")


def test_an_error_of_a_bar_ends_the_call():
    class Bar:
        is_closed = False

        def __init__(self, **_: object) -> None:
            pass

        def update(self, _: int) -> None:
            raise LookupError("no bar")

        def close(self) -> None:
            Bar.is_closed = True

    with server(SHOAL) as url, LLM(url=url) as llm:
        with pytest.raises(LookupError, match="no bar"):
            llm.generate(["a", "b"], use_tqdm=Bar)
        assert Bar.is_closed

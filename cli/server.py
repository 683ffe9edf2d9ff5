"""A synchronous client of a server, for commands."""

import http.client
import json
import socket
import ssl
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from cli.console import printable
from shared.errors import ConfigError, ShoalError

TIMEOUT_S = 600.0
DATA, DONE = b"data:", b"[DONE]"


class NoServerError(ConfigError):
    """The URL does not answer."""


class RefusedError(ShoalError):
    """The server answered with an error; the text is its own."""


class Server:
    """An OpenAI-compatible server at ``url``, with a key if it needs one."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url
        self._parts = urlsplit(url)
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s

    def get(self, path: str) -> Any:
        """Raises NoServerError, RefusedError."""
        return self._ask("GET", path, None)

    def post(self, path: str, body: Any) -> Any:
        """Raises NoServerError, RefusedError."""
        return self._ask("POST", path, body)

    def model(self) -> str:
        """The first listed model. Raises NoServerError, RefusedError."""
        reply = self.get("/v1/models")
        try:
            return str(reply["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise RefusedError(f"{self.url}/v1/models lists no model") from None

    def stream(self, path: str, body: Any) -> Generator[Any, None, None]:
        """Yields the events of a streamed reply; closing the iterator ends the request. Raises
        NoServerError, RefusedError, the latter also for a stream that breaks off."""
        with closing(self._connect()) as connection:
            response = self._send(connection, "POST", path, body)
            has_ended = False
            for line in _lines(response):
                if not line.startswith(DATA):
                    continue
                data = line.removeprefix(DATA).strip()
                if has_ended := data == DONE:
                    break
                event = _decoded(data)
                if isinstance(event, dict) and "error" in event:
                    raise RefusedError(_message(event))
                yield event
            if not has_ended:
                raise RefusedError("the reply broke off")

    def _ask(self, method: str, path: str, body: Any) -> Any:
        with closing(self._connect()) as connection:
            data = _read(self._send(connection, method, path, body))
        try:
            return json.loads(data)
        except ValueError:
            text = f"{self.url}{path} does not answer with JSON"
            raise RefusedError(text) from None

    def _connect(self) -> http.client.HTTPConnection:
        host, port = self._parts.hostname or "", self._parts.port
        if self._parts.scheme == "https":
            context = ssl.create_default_context()
            return http.client.HTTPSConnection(host, port, timeout=self._timeout_s, context=context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout_s)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any
    ) -> http.client.HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, self._parts.path + path, data, self._headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            text = f"--url: {self.url} does not answer: {_reason(error)}"
            hint = "start `shoal serve`, or set --url or SHOAL_URL"
            raise NoServerError(f"{text}; {hint}") from None
        if response.status != 200:
            text = f"{response.status}: {_message(_decoded(_read(response)))}"
            lacks_key = response.status == 401 and "Authorization" not in self._headers
            raise RefusedError(text + lacks_key * "; give it by --api-key or SHOAL_API_KEY")
        return response


def _read(response: http.client.HTTPResponse) -> bytes:
    try:
        return response.read()
    except (OSError, http.client.HTTPException) as error:
        raise RefusedError(f"the reply broke off: {_reason(error)}") from None


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    try:
        yield from response
    except (OSError, http.client.HTTPException) as error:
        raise RefusedError(f"the reply broke off: {_reason(error)}") from None


def _decoded(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return {"error": data.decode(errors="replace").strip()}


def _message(body: Any) -> str:
    """The text of an error in OpenAI's or any other format."""
    while isinstance(body, dict) and (inner := body.get("error") or body.get("message")):
        body = inner
    return printable(str(body))


def _reason(error: Exception) -> str:
    if isinstance(error, socket.timeout):
        return "it takes too long"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__

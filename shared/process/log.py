"""Logging: one line per event, time in UTC, as text or as JSON.

A line has a message and ``fields``. Strings from clients are truncated and escaped.
"""

import logging
import re
import time
from typing import Any

import msgspec

from shared.process.background_writer import BackgroundWriter
from shared.settings.base import Settings

MAX_CLIENT_TEXT = 80
MAX_PEER_TEXT = 500
ONE_WORD = r"[!-~]{1,160}"  # enough for a client's id of 128 characters and the mesh's additions

STDERR = 2
FLUSH_S = 1.0

REQUESTS = logging.getLogger("shoal.requests")
log = logging.getLogger(__name__)


def set_up(service: str, config: Settings) -> None:
    """``log-requests`` false silences REQUESTS only."""
    formatter = JsonFormatter if config.log_format == "json" else TextFormatter
    handler = _Handler(BackgroundWriter(STDERR, _report_dropped))
    handler.setFormatter(formatter(service, config.instance))
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    REQUESTS.setLevel(logging.NOTSET if config.log_requests else logging.WARNING)


def _report_dropped(num: int) -> None:
    log.warning("%d lines were dropped here: they could not be written, or not fast enough", num)


class _Handler(logging.Handler):
    """Leaves writing to the thread of ``output``, so that an unread log blocks nothing."""

    def __init__(self, output: BackgroundWriter) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._output.write(self.format(record) + "\n")
        except Exception:  # arguments that do not match the format
            self.handleError(record)

    def flush(self) -> None:
        self._output.wait_written(FLUSH_S)

    def close(self) -> None:
        self._output.close()
        super().close()


def write_error(text: str) -> None:
    """Writes ``text`` unchanged to standard error, after the logged lines."""
    for handler in logging.root.handlers:
        handler.flush()
    output = BackgroundWriter(STDERR, _report_dropped)
    output.write(f"{text}\n")
    output.wait_written(FLUSH_S)
    output.close()


def fields(**values: Any) -> dict[str, Any]:
    """The ``extra`` of a log line with ``values``; None is left out."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def log_end(event: str, name: str, **values: Any) -> None:
    """The one line of a request and hop, at its end: ``name`` is the mesh's or the client's."""
    if REQUESTS.isEnabledFor(logging.INFO):
        request = name.partition("~")[0]
        inner = name if name != request else None
        REQUESTS.info(event, extra=fields(request=request, name=inner, **values))


class TextFormatter(logging.Formatter):
    """``time LEVEL service instance message name=value …``, then the traceback of an error."""

    default_time_format = "%Y-%m-%dT%H:%M:%SZ"
    default_msec_format = None
    converter = staticmethod(time.gmtime)

    def __init__(self, service: str, instance: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)-7s {service} {instance} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        words = [f"{name}={_word(value)}" for name, value in _fields(record).items()]
        return " ".join([super().formatMessage(record), *words])


class JsonFormatter(logging.Formatter):
    """One object per line."""

    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"
    converter = staticmethod(time.gmtime)

    def __init__(self, service: str, instance: str) -> None:
        super().__init__()
        self._service = service
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "service": self._service,
            "instance": self._instance,
            "logger": record.name,
            "message": record.getMessage(),
            **{name: _rounded(value) for name, value in _fields(record).items()},
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(_encodable(line), enc_hook=str).decode()


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return getattr(record, "fields", {})


def _rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def _word(value: Any) -> str:
    """A value quoted so that it stays one word on one line."""
    text = str(_rounded(value))
    return text if re.fullmatch(ONE_WORD, text) else client_text(text)


def _encodable(line: dict[str, Any]) -> dict[str, Any]:
    """Replaces surrogates of undecodable bytes, which JSON cannot contain."""
    return {
        name: value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
        for name, value in line.items()
    }


def client_text(text: str) -> str:
    """``text`` safe for one line of a log."""
    return ascii(text if len(text) <= MAX_CLIENT_TEXT else text[:MAX_CLIENT_TEXT] + "…")


def peer_text(text: str) -> str:
    """A peer's text, on one line and of bounded length."""
    escaped = "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text[:MAX_PEER_TEXT]
    )
    return escaped[:MAX_PEER_TEXT]


MAX_KNOWN = 1000


class LogOnce:
    """Recognises new texts, so that a peer cannot fill the log by repetition; forgets the oldest
    above ``MAX_KNOWN``."""

    def __init__(self) -> None:
        self._known: dict[str, None] = {}

    def is_new(self, text: str) -> bool:
        if text in self._known:
            return False
        self._known[text] = None
        if len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]
        return True

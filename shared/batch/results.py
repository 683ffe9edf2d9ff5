"""Files of results in OpenAI's format, one line per request, from which a batch resumes."""

import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Raw, Struct

from shared.batch.lines import LineError
from shared.client.sender import BatchStopped, Reply
from shared.errors import ShoalError

ID_PREFIX = "batch_req_"


class Response(Struct):
    status_code: int
    request_id: str
    body: Raw


class Error(Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Result(Struct):
    """``id`` ends with the line number of the request."""

    id: str
    custom_id: str | None
    response: Response | None = None
    error: Error | None = None

    @property
    def is_good(self) -> bool:
        return self.response is not None and self.response.status_code < 300


class _Status(Struct):
    status_code: int


class _Written(Struct):
    id: str
    response: _Status | None


class NotWritten(BatchStopped):
    """A result could not be written; the text names the file and the reason. Written results stay,
    and a new start resumes from there."""


class WrongResults(ShoalError):
    """The file of results belongs to another batch, or another process writes it."""


def result_of_reply(batch: str, number: int, custom_id: str, reply: Reply) -> Result:
    response = Response(reply.status, reply.request_id, Raw(reply.body))
    return Result(_id(batch, number), custom_id, response)


def result_of_error(batch: str, wrong: LineError) -> Result:
    error = Error(wrong.code, wrong.message, wrong.param, wrong.number)
    return Result(_id(batch, wrong.number), wrong.custom_id, error=error)


def _id(batch: str, number: int) -> str:
    return f"{ID_PREFIX}{batch}_{number}"


class ResultFile:
    """Appends whole lines to ``path``, locked against other processes.

    ``batch`` identifies the batch; a file of another one is refused. Raises WrongResults and
    NotWritten.
    """

    def __init__(self, path: Path, batch: str) -> None:
        self.path = path
        self._prefix = f"{ID_PREFIX}{batch}_"
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise NotWritten(f"{path}: {error.strerror}") from None
        try:
            self._lock()
        except BaseException:
            os.close(self._file)
            raise
        self.num_bytes = 0

    def __enter__(self) -> "ResultFile":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read_done(self) -> Iterator[tuple[int, bool]]:
        """The number of each line with a result, and True if that is a success. Removes an
        incomplete last line, left by a killed writer."""
        self.num_bytes = 0
        with self.path.open("rb") as file:
            for place, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                yield self._read(text, place)
                self.num_bytes += len(text)
        os.ftruncate(self._file, self.num_bytes)

    def append(self, result: Result) -> None:
        """Leaves no part of a line behind if it cannot be written completely."""
        data = msgspec.json.encode(result) + b"\n"
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            os.ftruncate(self._file, self.num_bytes)
            raise NotWritten(f"{self.path}: {error.strerror}") from None
        self.num_bytes += len(data)

    def sync(self) -> None:
        """Returns when everything is on disk."""
        try:
            os.fsync(self._file)
        except OSError as error:
            raise NotWritten(f"{self.path}: {error.strerror}") from None

    def _lock(self) -> None:
        if not stat.S_ISREG(os.fstat(self._file).st_mode):
            raise WrongResults(f"{self.path} is no file")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WrongResults(f"{self.path} is being written by another process") from None

    def _read(self, text: bytes, place: int) -> tuple[int, bool]:
        try:
            written = msgspec.json.decode(text, type=_Written)
            number = int(written.id.removeprefix(self._prefix))
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError):
            raise WrongResults(
                f"{self.path}, line {place}, is no result of this input; remove the file, or name"
                " another"
            ) from None
        return number, written.response is not None and written.response.status_code < 300

"""Sends the lines of a batch file, a limited number at a time, and writes a result for each."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
from msgspec import Raw, Struct

from shared.batch.lines import BatchLine, LineError, Text, parse_line, read_lines
from shared.batch.results import Result, ResultFile, result_of_error, result_of_reply
from shared.client.sender import NoReply, Reply

AHEAD_BYTES = 1 << 20


class Usage(Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None


class _Body(Struct):
    usage: Usage | None = None


@dataclass(slots=True)
class Counts:
    """Counts over all lines, earlier runs included; tokens of this run only."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0

    def note(self, is_good: bool) -> None:
        self.completed += is_good
        self.failed += not is_good

    def note_usage(self, body: bytes) -> None:
        try:
            usage = msgspec.json.decode(body, type=_Body).usage or Usage()
        except msgspec.ValidationError:  # a server with another format of usage
            return
        self.num_prompt_tokens += usage.prompt_tokens or usage.input_tokens or 0
        self.num_output_tokens += usage.completion_tokens or usage.output_tokens or 0


class Done:
    """The lines with a result: a byte for each line of the input."""

    def __init__(self, num_lines: int) -> None:
        self._is_done = bytearray(num_lines + 1)

    def add(self, number: int) -> bool:
        """True if the line had no result before."""
        is_new = number < len(self._is_done) and not self._is_done[number]
        if is_new:
            self._is_done[number] = 1
        return is_new

    def __contains__(self, number: int) -> bool:
        return bool(self._is_done[number])


class Send(Protocol):
    async def __call__(self, url: str, body: bytes) -> Reply: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of a run. ``batch`` is part of the results' ids; ``priority`` is set in bodies
    without one or with an earlier one."""

    path: Path
    batch: str
    max_line_bytes: int
    num_lines: int
    endpoint: str | None = None
    priority: int | None = None


def read_results(files: tuple[ResultFile, ...], num_lines: int, counts: Counts) -> Done:
    """The lines done by earlier runs, added to ``counts``. Raises WrongResults."""
    done = Done(num_lines)
    for file in files:
        for number, is_good in file.read_done():
            if done.add(number):
                counts.note(is_good)
    return done


class BatchRun:
    """Successes go to ``good``, errors to ``bad``, which may be the same file."""

    def __init__(
        self, plan: Plan, good: ResultFile, bad: ResultFile, counts: Counts, done: Done, send: Send
    ) -> None:
        self._plan = plan
        self._good = good
        self._bad = bad
        self._counts = counts
        self._done = done
        self._send = send
        self._texts = self._left()
        self._ahead: deque[Text] = deque()
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()
        self.on_result: Callable[[], None] = lambda: None

    async def run(self, num_at_once: int) -> None:
        """Raises an ExceptionGroup of BatchStopped, and OSError if the input cannot be read."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_at_once):
                tasks.create_task(self._work())

    async def fail_rest(self, code: str, message: str) -> None:
        """Writes an error for each line without a result."""
        while (text := await self._next()) is not None:
            line = parse_line(text, self._plan.max_line_bytes, self._plan.endpoint)
            wrong = LineError(line.number, code, message, None, line.custom_id)
            await self._write(line.number, result_of_error(self._plan.batch, wrong))

    async def _work(self) -> None:
        while (text := await self._next()) is not None:
            await self._write(text[0], await self._result(text))

    async def _next(self) -> Text | None:
        async with self._reading:
            if not self._ahead:
                self._ahead.extend(await asyncio.to_thread(_take, self._texts))
            return self._ahead.popleft() if self._ahead else None

    def _left(self) -> Iterator[Text]:
        for text in read_lines(self._plan.path, self._plan.max_line_bytes):
            if text[0] <= self._plan.num_lines and text[0] not in self._done:
                yield text

    async def _result(self, text: Text) -> Result:
        plan = self._plan
        line = parse_line(text, plan.max_line_bytes, plan.endpoint)
        if isinstance(line, LineError):
            return result_of_error(plan.batch, line)
        try:
            reply = await self._send(line.url, _body(line, plan.priority))
        except NoReply as error:
            message = f"line {line.number}: {error}"
            wrong = LineError(line.number, "no_reply", message, None, line.custom_id)
            return result_of_error(plan.batch, wrong)
        self._counts.note_usage(reply.body)
        return result_of_reply(plan.batch, line.number, line.custom_id, reply)

    async def _write(self, number: int, result: Result) -> None:
        async with self._writing:
            await _to_end(self._append(number, result))

    async def _append(self, number: int, result: Result) -> None:
        file = self._good if result.is_good else self._bad
        await asyncio.to_thread(file.append, result)
        self._done.add(number)
        self._counts.note(result.is_good)
        self.on_result()


async def _to_end(work: Coroutine[Any, Any, None]) -> None:
    """Completes a write and its count, even if this task is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await task
        raise


def _take(texts: Iterator[Text]) -> list[Text]:
    """At least one line, and as many more as fit ``AHEAD_BYTES``."""
    taken: list[Text] = []
    num_bytes = 0
    while num_bytes < AHEAD_BYTES and (text := next(texts, None)) is not None:
        taken.append(text)
        num_bytes += len(text[1] or b"")
    return taken


def _body(line: BatchLine, priority: int | None) -> bytes:
    if priority is None:
        return bytes(line.body)
    fields = msgspec.json.decode(line.body, type=dict[str, Raw])
    own = fields.get("priority", Raw(b"null"))
    if not _is_later(own, priority):
        fields["priority"] = Raw(str(priority).encode())
    return msgspec.json.encode(fields)


def _is_later(own: Raw, priority: int) -> bool:
    """True if the line's own priority is later; the server refuses invalid values."""
    value = msgspec.json.decode(own)
    return value is not None and (not isinstance(value, int) or value > priority)

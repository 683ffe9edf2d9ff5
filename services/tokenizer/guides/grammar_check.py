"""Tries grammars in a process that may die of them, before any reaches a worker."""

import asyncio
import logging
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec

from services.tokenizer.guides.causes import GrammarPart, cause
from services.tokenizer.guides.child import Question, Verdict, Vocabulary
from services.tokenizer.guides.limits import invalid
from shared.child_process.child import LENGTH
from shared.errors import GRAMMAR_TOO_COMPLEX, RETRY_AFTER_S, Overloaded, Unavailable

log = logging.getLogger(__name__)

MAX_VERDICTS = 4096
MAX_UNHELD = 64
MAX_WAITING = 64
MAX_WAITING_PER_OWNER = 8
MAX_TRIAL_S = 60.0  # wall-clock limit for a stuck child; the child itself counts processor time
MAX_START_S = 60.0
GRACE_S = 1.0
GONE = (0, -signal.SIGKILL)  # it ended after an earlier grammar, or was killed from outside

SLOW = "to compile it, or to find the tokens that it allows, takes too long"


@dataclass(frozen=True, slots=True)
class _Found:
    """``part`` is the field to which the verdict belongs; empty: to the whole."""

    verdict: Verdict
    part: str = ""


def _no_parts() -> list[GrammarPart]:
    return []


class GrammarCheck:
    """Has one child, which starts with the first grammar and stays. ``close`` ends it."""

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._read_vocabulary = read_vocabulary
        self._verdicts: OrderedDict[bytes, _Found] = OrderedDict()
        self._probes: OrderedDict[bytes, bool] = OrderedDict()  # True: a grammar can express it
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._num_waiting_of: Counter[str] = Counter()
        self._child: Process | None = None
        self._trial: asyncio.Task[Any] | None = None

    async def check(
        self,
        grammar: str,
        param: str,
        owner: str = "",
        read_parts: Callable[[], list[GrammarPart]] = _no_parts,
    ) -> None:
        """Raises InvalidRequest naming ``param`` for a grammar that is wrong or costs too much, or
        the field of one of its parts, if that part is wrong by itself; ``read_parts`` is called on
        a thread. Raises Overloaded if too many grammars of ``owner`` wait, if it has a name, and
        Unavailable if too many wait in all or no verdict is possible now. A cancelled caller
        leaves the waiting queue."""
        key = blake2b(f"{param}\0{grammar}".encode(), digest_size=16).digest()
        found = self._verdicts.get(key) or await self._ask(key, grammar, owner, read_parts)
        self._verdicts.move_to_end(key)
        error = cause(found.verdict.error, bool(found.part))
        if found.verdict.kind == "complex":
            raise invalid(
                param, f"the grammar is too complex: {error or SLOW}", GRAMMAR_TOO_COMPLEX
            )
        if found.part:
            raise invalid(found.part, f"it cannot be enforced: {error}")
        if found.verdict.kind == "wrong":
            raise invalid(param, f"the grammar cannot be used: {error}")

    async def unheld(self, probes: Collection[str], owner: str = "") -> frozenset[str]:
        """The JSON schemas of ``probes`` that no grammar can express, at most ``MAX_UNHELD`` of
        them. Raises like ``check`` while too many wait."""
        keys = {probe: blake2b(probe.encode(), digest_size=16).digest() for probe in probes}
        unknown = sorted(probe for probe, key in keys.items() if key not in self._probes)
        found: dict[str, bool] = {}
        if unknown:
            await self._wait_for_turn(owner)
            self._trial = trial = asyncio.create_task(self._try_probes(unknown))
            trial.add_done_callback(self._end_turn)
            found = await asyncio.shield(trial)
        for probe, is_held in found.items():
            self._probes[keys[probe]] = is_held
        held = {probe: found.get(probe, self._probes.get(key, True)) for probe, key in keys.items()}
        while len(self._probes) > MAX_VERDICTS:
            self._probes.popitem(last=False)
        return frozenset(probe for probe, is_held in held.items() if not is_held)

    async def _try_probes(self, probes: list[str]) -> dict[str, bool]:
        """The known verdicts: a probe that is too complex, and all probes after it, are left to
        the trial of the whole grammar."""
        found: dict[str, bool] = {}
        num_unheld = 0
        while len(found) < len(probes) and num_unheld < MAX_UNHELD:
            rest = probes[len(found) :]
            question = Question([_of_schema(each) for each in rest], compiles_only=True)
            verdict = await self._ask_child(question) or await self._ask_child(question)
            if verdict is None:
                raise _unavailable("the process that checks grammars was killed")
            if verdict.kind == "complex":
                break
            is_wrong = verdict.kind == "wrong"
            end = verdict.index if is_wrong else len(rest)
            found |= dict.fromkeys(rest[:end], True)
            if is_wrong:
                found[rest[end]] = False
                num_unheld += 1
        return found

    async def close(self) -> None:
        if self._trial is not None:
            self._trial.cancel()
            await asyncio.wait([self._trial])
        await self._end_child()

    async def _ask(
        self, key: bytes, grammar: str, owner: str, read_parts: Callable[[], list[GrammarPart]]
    ) -> _Found:
        await self._wait_for_turn(owner)
        if key in self._verdicts:  # the same grammar was before us
            self._turn.release()
            return self._verdicts[key]
        self._trial = asyncio.create_task(self._try(key, grammar, read_parts))
        self._trial.add_done_callback(self._end_turn)
        return await asyncio.shield(self._trial)

    async def _wait_for_turn(self, owner: str) -> None:
        """Without keys all clients share one empty name."""
        if owner and self._num_waiting_of[owner] >= MAX_WAITING_PER_OWNER:
            raise Overloaded(
                f"{MAX_WAITING_PER_OWNER} grammars of this API key wait to be checked",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._num_waiting >= MAX_WAITING:
            raise _unavailable(f"{MAX_WAITING} grammars wait to be checked")
        self._num_waiting += 1
        self._num_waiting_of[owner] += 1
        try:
            await self._turn.acquire()
        finally:
            self._num_waiting -= 1
            self._num_waiting_of[owner] -= 1
            if not self._num_waiting_of[owner]:
                del self._num_waiting_of[owner]

    def _end_turn(self, trial: asyncio.Task[Any]) -> None:
        """A trial ends by itself, even without a waiting caller."""
        self._turn.release()
        if not trial.cancelled():
            trial.exception()

    async def _try(
        self, key: bytes, grammar: str, read_parts: Callable[[], list[GrammarPart]]
    ) -> _Found:
        question = Question([grammar])
        verdict = await self._ask_child(question) or await self._ask_child(question)
        if verdict is None:
            raise _unavailable("the process that checks grammars was killed")
        found = _Found(verdict)
        if verdict.kind == "wrong":
            parts = await asyncio.to_thread(read_parts)
            found = await self._find_part(parts) or found
        self._verdicts[key] = found
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return found

    async def _find_part(self, parts: list[GrammarPart]) -> _Found | None:
        """The first part that is wrong by itself; None also if it is not found in time."""
        try:
            verdict = await self._ask_child(Question([each.grammar for each in parts], True))
        except Unavailable:
            return None
        if verdict is None or verdict.kind != "wrong":
            return None
        return _Found(verdict, parts[verdict.index].param)

    async def _ask_child(self, question: Question) -> Verdict | None:
        """None: the child is gone, which does not depend on this grammar: it had tried others
        before, or was killed from outside. Raises Unavailable if the machine is too busy."""
        is_fresh = self._child is None
        child = self._child or await self._start()
        try:
            async with asyncio.timeout(MAX_TRIAL_S):
                return await _answer(child, msgspec.msgpack.encode(question))
        except TimeoutError:
            await self._end_child()
            raise _unavailable("the grammar could not be checked in time") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            if await self._end_child() in GONE or not is_fresh:
                return None
        num_chars = sum(map(len, question.grammars))
        log.warning("a grammar of %d characters ended the process that tried it", num_chars)
        return Verdict("complex")

    async def _start(self) -> Process:
        """Raises Unavailable if the child does not come up."""
        vocabulary = msgspec.msgpack.encode(await asyncio.to_thread(self._read_vocabulary))
        try:
            self._child = child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "services.tokenizer.guides.child"),
                stdin=PIPE,
                stdout=PIPE,
            )
            async with asyncio.timeout(MAX_START_S):
                await _answer(child, vocabulary)
        except (OSError, asyncio.IncompleteReadError) as error:  # a timeout is an OSError, too
            code = await self._end_child()
            log.error("no process can try grammars: %r, exit code %s", error, code)
            raise _unavailable("grammars cannot be checked now") from None
        return child

    async def _end_child(self) -> int | None:
        """It ends by itself when its pipe does, unless a grammar holds it so that it cannot.
        Returns its exit code."""
        child, self._child = self._child, None
        if child is None:
            return None
        assert child.stdin is not None
        child.stdin.close()
        try:
            async with asyncio.timeout(GRACE_S):
                return await child.wait()
        except TimeoutError:
            child.kill()
            return await child.wait()


def _unavailable(problem: str) -> Unavailable:
    return Unavailable(problem, retry_after_s=RETRY_AFTER_S)


def _of_schema(schema: str) -> str:
    return f'{{"grammars":[{{"json_schema":{schema}}}]}}'


async def _answer(child: Process, data: bytes) -> Verdict:
    """Raises IncompleteReadError or ConnectionError when the child dies."""
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(LENGTH.pack(len(data)) + data)
    await child.stdin.drain()
    (num_bytes,) = LENGTH.unpack(await child.stdout.readexactly(LENGTH.size))
    return msgspec.msgpack.decode(await child.stdout.readexactly(num_bytes), type=Verdict)

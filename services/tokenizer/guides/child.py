"""The process that tries grammars: ``python -m services.tokenizer.guides.child``.

A grammar can overflow the stack of llguidance or keep it busy for minutes, and a call of it cannot
be interrupted. So this process does nothing else and may die of a grammar; its parent then starts
another.

Stdin and stdout carry msgpack arrays, each after its length: first the vocabulary, answered with
the verdict "", then Questions, each answered with a Verdict.
"""

import os
import re
import select
import threading
import time
from queue import SimpleQueue
from random import Random
from typing import Literal

import msgspec
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from shared.child_process import child
from shared.guides.limits import COMPILE_STACK_BYTES, PARSER_LIMITS

MAX_CPU_S = 1.0  # to compile a grammar and to walk
MAX_MASK_S = 0.05
NUM_TRIALS = 3  # all too slow: a busy machine, or its host, may have made one so
MIN_STEPS, MAX_STEPS = 64, 256  # of the walk, which ends after the first if it is cheap so far
CHEAP_WALK_S = 0.01
MAX_WALK_S = 0.8 * MAX_CPU_S
MORE_MEMORY_BYTES = 1 << 30  # than the process has before the first grammar
MAX_ERROR_CHARS = 500
POLL_S = 0.02

_OVER_LIMIT = re.compile(r"too (big|large|many|complex)|max is \d")  # in llguidance's errors
_ALLOWED_BYTE = re.compile(rb"[^\0]")


class Vocabulary(msgspec.Struct, array_like=True):
    """``text`` is that of tokenizer.json."""

    text: str
    size: int
    end_ids: list[int]


class Question(msgspec.Struct, array_like=True):
    """Are these ``grammars`` fit to be used? ``compiles_only``: are they grammars at all?"""

    grammars: list[str]
    compiles_only: bool = False


class Verdict(msgspec.Struct, array_like=True):
    """The verdict on grammar number ``index``, the first that is not ok; ``error`` is llguidance's
    own, if it has one."""

    kind: Literal["ok", "wrong", "complex"]
    error: str = ""
    index: int = 0


TOO_SLOW = Verdict("complex")


def main() -> None:
    if not child.begin():
        return
    asked = child.read()
    if not asked:
        return
    vocabulary = msgspec.msgpack.decode(asked, type=Vocabulary)
    tokenizer = LLTokenizer(
        vocabulary.text, n_vocab=vocabulary.size, eos_token=vocabulary.end_ids or None
    )
    trial = _Trial(tokenizer, {*vocabulary.end_ids, tokenizer.eos_token})
    child.limit_memory(MORE_MEMORY_BYTES)
    child.write(Verdict("ok"))
    while question := child.read():
        child.write(trial.verdict(msgspec.msgpack.decode(question, type=Question)))


class _Trial:
    """A thread with a large stack, and a watch on its processor time."""

    def __init__(self, tokenizer: LLTokenizer, end_ids: set[int]) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._questions: SimpleQueue[Question] = SimpleQueue()
        self._verdicts: SimpleQueue[Verdict] = SimpleQueue()
        self._is_done, self._done = os.pipe()
        threading.stack_size(COMPILE_STACK_BYTES)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._thread.ident is not None
        self._clock = time.pthread_getcpuclockid(self._thread.ident)

    def verdict(self, question: Question) -> Verdict:
        """Ends the process after MAX_CPU_S, and when the parent is gone."""
        end_s = time.clock_gettime(self._clock) + MAX_CPU_S
        self._questions.put(question)
        while True:
            readable, _, _ = select.select([self._is_done, 0], [], [], POLL_S)
            if self._is_done in readable:
                os.read(self._is_done, 1)
                return self._verdicts.get()
            if 0 in readable:  # the parent sends one question at a time, so this is the pipe's end
                os._exit(0)
            if time.clock_gettime(self._clock) > end_s:
                child.write(Verdict("complex"))
                os._exit(0)

    def _run(self) -> None:
        while True:
            self._verdicts.put(self._answer(self._questions.get()))
            os.write(self._done, b"\0")

    def _answer(self, question: Question) -> Verdict:
        for index, grammar in enumerate(question.grammars):
            verdict = self._tried(grammar, question.compiles_only)
            if verdict.kind != "ok":
                return msgspec.structs.replace(verdict, index=index)
        return Verdict("ok")

    def _tried(self, grammar: str, compiles_only: bool) -> Verdict:
        """Makes a new matcher for each trial, because copies of a matcher share cached results."""
        end_s = time.thread_time() + MAX_WALK_S
        for _ in range(NUM_TRIALS):
            verdict = self._tried_once(grammar, compiles_only, end_s)
            if verdict != TOO_SLOW:
                break
        return verdict

    def _tried_once(self, grammar: str, compiles_only: bool, end_s: float) -> Verdict:
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        if matcher.is_error():
            return _failed(matcher)
        if compiles_only:
            return Verdict("ok")
        return self._walk(matcher, Random(grammar), end_s)

    def _walk(self, matcher: LLMatcher, random: Random, end_s: float) -> Verdict:
        """Goes through a text as long as it may be: some grammars cost more with each token."""
        mask_s: list[float] = []
        while len(mask_s) < MAX_STEPS:
            begin_s = time.thread_time()
            if len(mask_s) >= MIN_STEPS:
                is_growing = _grow(mask_s)
                if begin_s > end_s:
                    return TOO_SLOW if is_growing else Verdict("ok")
                if not is_growing and sum(mask_s) < CHEAP_WALK_S:
                    break
            mask = self._without_ends(matcher.compute_bitmask())
            mask_s.append(time.thread_time() - begin_s)
            if mask_s[-1] > MAX_MASK_S:
                return TOO_SLOW
            if matcher.is_error() or matcher.is_stopped() or not any(mask):
                break
            forced = matcher.compute_ff_tokens()
            matcher.consume_token(forced[0] if forced else _choose(mask, random))
        return _failed(matcher) if matcher.is_error() else Verdict("ok")

    def _without_ends(self, mask: bytes) -> bytearray:
        others = bytearray(mask)
        for end_id in self._end_ids:
            others[end_id >> 3] &= ~(1 << (end_id & 7))
        return others


def _grow(costs: list[float]) -> bool:
    """True if the second half costs more than twice as much as the first: on any machine, however
    far it comes."""
    half = len(costs) // 2
    return sum(costs[half:]) > 2 * sum(costs[:half])


def _failed(matcher: LLMatcher) -> Verdict:
    error = matcher.get_error().removesuffix("<non-verbose/>").strip()[:MAX_ERROR_CHARS]
    return Verdict("complex" if _OVER_LIMIT.search(error) else "wrong", error)


def _choose(mask: bytearray, random: Random) -> int:
    """The lowest id that ``mask`` allows from a random one on, else from 0 on."""
    found = _ALLOWED_BYTE.search(mask, random.randrange(len(mask))) or _ALLOWED_BYTE.search(mask)
    assert found is not None
    bits = mask[found.start()]
    return found.start() * 8 + (bits & -bits).bit_length() - 1


if __name__ == "__main__":
    main()

"""Compiles grammars for the model's vocabulary, each once while it is in use."""

import json
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.worker.slots.guide import NotCompiled
from shared.guides.limits import COMPILE_STACK_BYTES, PARSER_LIMITS
from shared.model_folder import TOKENIZER_FILE

MAX_COMPILED = 256
MAX_COMPILED_CHARS = 8 << 20  # of their texts; compiled ones are a few times as large
MAX_STALL_S = 60.0  # grammars that pass the tokenizer's trial compile in seconds


class GrammarError(Exception):
    """The reason why a grammar has no matcher."""


class Progress:
    """The time at which the compiler thread last finished a grammar."""

    def __init__(self) -> None:
        self.last_s = time.monotonic()


class Compiled(NamedTuple):
    """A grammar, compiled or queued."""

    future: Future[LLMatcher]
    queued_s: float
    progress: Progress

    def start(self) -> LLMatcher:
        """Returns a matcher at the start of an output, to be copied. Raises NotCompiled, or
        GrammarError if it failed. A long queue is no error while it moves."""
        if self.future.done():
            return self.future.result()
        if time.monotonic() - max(self.queued_s, self.progress.last_s) > MAX_STALL_S:
            raise GrammarError(f"its grammar did not compile within {MAX_STALL_S:.0f} s")
        raise NotCompiled


class Grammars:
    """Compiles in a thread of its own, while the prompt is computed."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        """``folder`` is the model's."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._compiled: OrderedDict[str, Compiled] = OrderedDict()
        self._num_chars = 0
        self._progress = Progress()
        self._thread = _deep_thread()
        self._thread.submit(self._tokenizer)  # ready for the first grammar

    def compile(self, grammar: str) -> Compiled:
        if grammar not in self._compiled:
            future = self._thread.submit(self._compile, grammar)
            self._compiled[grammar] = Compiled(future, time.monotonic(), self._progress)
            self._num_chars += len(grammar)
        self._compiled.move_to_end(grammar)
        while len(self._compiled) > MAX_COMPILED or self._num_chars > MAX_COMPILED_CHARS:
            oldest, _ = self._compiled.popitem(last=False)
            self._num_chars -= len(oldest)
        return self._compiled[grammar]

    def _compile(self, grammar: str) -> LLMatcher:
        try:
            return self._make_start(grammar)
        finally:
            self._progress.last_s = time.monotonic()

    def _make_start(self, grammar: str) -> LLMatcher:
        limits = LLParserLimits(**PARSER_LIMITS)
        matcher = LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"its grammar is none: {first_line(matcher.get_error())}")
        return matcher

    def _tokenizer(self) -> LLTokenizer:
        return _make_tokenizer(self._folder / TOKENIZER_FILE, self._vocab_size, self._eos_ids)


def first_line(error: str) -> str:
    """The rest quotes the grammar."""
    return error.partition("\n")[0][:500]


@lru_cache(maxsize=2)
def _make_tokenizer(file: Path, vocab_size: int, eos_ids: tuple[int, ...]) -> LLTokenizer:
    """Its vocabulary is the larger of the model's and the file's. Raises GrammarError for an
    unusable file."""
    try:
        text = file.read_text()
        num_ids = max(vocab_size, _num_ids(text))
        return LLTokenizer(text, n_vocab=num_ids, eos_token=list(eos_ids))
    except (OSError, ValueError) as error:
        raise GrammarError(f"the model's {file.name} serves no grammar: {error}") from None


def _num_ids(text: str) -> int:
    """The number of ids in a tokenizer.json, gaps included. Raises ValueError for an invalid
    one."""
    try:
        file = json.loads(text)
        vocab = file["model"]["vocab"]
        ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
        return 1 + max([*ids, *(each["id"] for each in file.get("added_tokens", []))], default=-1)
    except (KeyError, TypeError) as error:
        raise ValueError(f"it has no vocabulary ({error!r})") from None


def _deep_thread() -> ThreadPoolExecutor:
    executor = ThreadPoolExecutor(1, "grammars")
    usual_bytes = threading.stack_size(COMPILE_STACK_BYTES)
    executor.submit(int)  # starts the thread
    threading.stack_size(usual_bytes)
    return executor

"""Recorded requests of a server: lengths of prompts and answers, and arrival times."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shared.errors import ConfigError
from shared.model_folder import TOKENIZER_FILE

ENDED = "request ended"  # the message of a gateway's log line; other lines are ignored
Tokenize = Callable[[str], int]  # counts the tokens of a text


@dataclass(frozen=True, slots=True)
class Request:
    """``arrived_s`` counts from any origin; None if the log has no times. An answer of unknown
    length counts as long as allowed (``is_bound``)."""

    num_prompt_tokens: int
    num_output_tokens: int
    arrived_s: float | None = None
    is_bound: bool = False


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Line(msgspec.Struct, frozen=True):
    """A line in any of the supported formats. ``time`` and ``total_s``, the end and duration of a
    request, are of Shoal's own log."""

    message: Any = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    usage: _Usage | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    timestamp: float | str | None = None
    time: str | None = None
    total_s: float = 0.0


def read(path: Path, tokenize: Tokenize, default_output: int) -> list[Request]:
    """Returns the requests of a file with one JSON object per line, in order of arrival. Other
    lines, as in the log of ``shoal serve``, are ignored. Raises ConfigError with the line
    number."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--requests: cannot read {path}: {error.strerror}") from None
    decoder = msgspec.json.Decoder(_Line)
    requests = []
    for number, data in enumerate(text.splitlines(), 1):
        if data.lstrip().startswith(b"{"):
            try:
                request = _request(decoder.decode(data), tokenize, default_output)
            except ValueError as error:  # includes msgspec's errors
                raise ConfigError(f"--requests: {path}, line {number}: {error}") from None
            if request is not None:
                requests.append(request)
    if not requests:
        raise ConfigError(f"--requests: {path} has no request")
    return _in_order(requests, path)


class Tokenizer:
    """Counts tokens of texts; reads the tokenizer's file on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._encoder: Any = None

    def __call__(self, text: str) -> int:
        if self._encoder is None:
            path = self._folder / TOKENIZER_FILE
            if not path.is_file():
                raise ValueError(
                    f"has a text, and {self._folder} has no {TOKENIZER_FILE} to count its tokens"
                )
            import tokenizers

            self._encoder = tokenizers.Tokenizer.from_file(str(path))
        return len(self._encoder.encode(text).ids)


def _in_order(requests: list[Request], path: Path) -> list[Request]:
    timed = [each for each in requests if each.arrived_s is not None]
    if not timed:
        return requests
    if len(timed) < len(requests):
        num = len(requests) - len(timed)
        raise ConfigError(f"--requests: {path}: {num} of {len(requests)} lines have no timestamp")
    return sorted(requests, key=lambda each: each.arrived_s or 0.0)


def _request(line: _Line, tokenize: Tokenize, default_output: int) -> Request | None:
    """None if the line is no request. Raises ValueError."""
    if isinstance(line.message, str) and line.message != ENDED:
        return None
    num_prompt = _prompt_tokens(line, tokenize)
    if num_prompt is None and line.message == ENDED:
        return None
    if not num_prompt:
        raise ValueError(
            "needs prompt_tokens, num_prompt_tokens, usage, prompt or messages, of a token or more"
        )
    usage = line.usage or _Usage()
    counted = (line.completion_tokens, line.num_output_tokens, usage.completion_tokens)
    known = next((each for each in counted if each), None)
    bound = line.max_completion_tokens or line.max_tokens or default_output
    return Request(num_prompt, known or bound, _arrival(line), known is None)


def _prompt_tokens(line: _Line, tokenize: Tokenize) -> int | None:
    usage = line.usage or _Usage()
    counted = (line.prompt_tokens, line.num_prompt_tokens, usage.prompt_tokens)
    if num := next((each for each in counted if each), None):
        return num
    if isinstance(line.prompt, list):
        return len(line.prompt)
    if line.prompt is not None:
        return tokenize(line.prompt)
    if line.messages is not None:
        return tokenize("\n".join(str(each.get("content") or "") for each in line.messages))
    return None


def _arrival(line: _Line) -> float | None:
    if isinstance(line.timestamp, float):
        return line.timestamp
    text = line.timestamp or line.time
    if text is None:
        return None
    # Some logs have seven decimals of a second; Python reads six.
    text = re.sub(r"(\.\d{6})\d+", r"\1", text)
    return datetime.fromisoformat(text).timestamp() - line.total_s


def made_up(num_prompt_tokens: Sequence[int], num_output_tokens: Sequence[int]) -> list[Request]:
    pairs = zip(num_prompt_tokens, num_output_tokens, strict=True)
    return [Request(num_in, num_out) for num_in, num_out in pairs]


def at_rate(requests: Sequence[Request], rate: float) -> list[Request]:
    """Replaces the times by random arrivals, ``rate`` per second (a Poisson process with a fixed
    seed)."""
    gaps = np.random.default_rng(0).exponential(1 / rate, len(requests))
    times = np.cumsum(gaps).tolist()
    return [
        Request(each.num_prompt_tokens, each.num_output_tokens, time, each.is_bound)
        for each, time in zip(requests, times, strict=True)
    ]


PERCENTILES = (50, 95, 99)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, percentiles and maximum."""
    array = np.asarray(values, np.float64)
    cuts = np.percentile(array, PERCENTILES).tolist()
    named = {f"p{each}": cut for each, cut in zip(PERCENTILES, cuts, strict=True)}
    return {"mean": float(array.mean()), **named, "max": float(array.max())}


def describe(requests: Sequence[Request]) -> dict[str, Any]:
    """Lengths and arrival rate, for JSON."""
    found: dict[str, Any] = {
        "num": len(requests),
        "prompt_tokens": spread([each.num_prompt_tokens for each in requests]),
        "output_tokens": spread([each.num_output_tokens for each in requests]),
        "total_tokens": spread(
            [each.num_prompt_tokens + each.num_output_tokens for each in requests]
        ),
        "num_bound": sum(each.is_bound for each in requests),
    }
    times = [each.arrived_s for each in requests if each.arrived_s is not None]
    if len(times) > 1 and times[-1] > times[0]:
        seconds = np.bincount((np.asarray(times) - times[0]).astype(np.int64))
        found["per_s"] = {
            "mean": (len(times) - 1) / (times[-1] - times[0]),
            "p95": float(np.percentile(seconds, 95)),
            "max": int(seconds.max()),
        }
    return found


def enough_len(requests: Sequence[Request], longest: int, step: int = 256) -> int:
    """The ``max-model-len`` for the 99th percentiles of prompts and answers together, rounded up to
    ``step``, at most the model's."""
    prompts = [each.num_prompt_tokens for each in requests]
    answers = [each.num_output_tokens for each in requests]
    wanted = int(np.percentile(prompts, 99) + np.percentile(answers, 99))
    return min(-(-wanted // step) * step, longest)

"""Bodies of the requests, made and encoded before the load begins."""

from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from cli.bench.settings import Settings
from cli.bench.trace import TraceLine

FIRST_ID = 10  # most vocabularies have special tokens below it
# Words of a chat, in place of a completion's ids. Each is one token in most vocabularies.
TEXT = (
    "the of and to in is that for it as was with be by on not he his but at are this have from or"
    " had an they which one you were all her she there would their we him been has when who will"
    " more no if out so said what up its about into than them can only other new some could time"
)
WORDS = TEXT.split()


@dataclass(frozen=True)
class Request:
    body: bytes
    max_tokens: int


def random_prompts(settings: Settings, num: int, rng: np.random.Generator) -> list[list[int]]:
    """Ids from FIRST_ID to the vocabulary's end: one of the common prefixes, then a random number
    of ids from the input length's distribution."""
    shape = (settings.num_prefixes, settings.prefix_len)
    prefixes = rng.integers(FIRST_ID, settings.vocab_size, size=shape).tolist()
    return [
        prefixes[rng.integers(settings.num_prefixes)]
        + rng.integers(FIRST_ID, settings.vocab_size, size=length).tolist()
        for length in settings.input_len.draw(num, rng)
    ]


def random_requests(
    settings: Settings, model: str, num: int, rng: np.random.Generator
) -> list[Request]:
    output_lens = settings.output_len.draw(num, rng)
    prompts = random_prompts(settings, num, rng)
    return [
        _request(settings, model, _content(settings, prompt), max_tokens)
        for prompt, max_tokens in zip(prompts, output_lens, strict=True)
    ]


def traced_requests(
    settings: Settings, model: str, lines: list[TraceLine], rng: np.random.Generator
) -> list[Request]:
    """A line without ``max_tokens`` gets one from the output length."""
    output_lens = settings.output_len.draw(len(lines), rng)
    return [
        _request(settings, model, line.content(settings.endpoint), line.max_tokens or output_len)
        for line, output_len in zip(lines, output_lens, strict=True)
    ]


def _content(settings: Settings, ids: list[int]) -> dict[str, Any]:
    if settings.endpoint == "completions":
        return {"prompt": ids}
    text = " ".join(WORDS[token_id % len(WORDS)] for token_id in ids)
    return {"messages": [{"role": "user", "content": text}]}


def _request(settings: Settings, model: str, content: dict[str, Any], max_tokens: int) -> Request:
    body = {
        "model": model,
        **content,
        "max_tokens": max_tokens,
        "temperature": settings.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if settings.ignore_eos:
        body["ignore_eos"] = True
    if settings.logprobs is not None and settings.endpoint == "completions":
        body["logprobs"] = settings.logprobs
    elif settings.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": settings.logprobs}
    return Request(msgspec.json.encode(body | settings.extra_body), max_tokens)

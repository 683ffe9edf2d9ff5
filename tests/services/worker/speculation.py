"""Engines with and without drafts, and requests for both."""

from functools import cache
from typing import Any

from tokenizers import Tokenizer

from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine, make_engine
from benchmarks.harness.scheduled import Run
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams

BEGINNINGS = (
    "import os\nimport sys\n\n\nclass Server:\n    def __init__(self, ",
    "def main():\n    parser = argparse.",
    '"""Utilities for ',
    "    for i in range(len(",
    "# Copyright (c) 2001\n\nfrom __future__ import annotations\n\n",
    "    def test_one(self):\n        self.assertEqual(",
    "try:\n    import ",
    "    raise ValueError('",
    "The quick brown fox",
    "if __name__ == '__main__':\n",
    "    @property\n    def name(self):\n        return self.",
    "x = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 1, 2, 3, 4, 5, 6",
)
METHODS = ("mtp", "ngram")


@cache
def prompts() -> list[list[int]]:
    """24 of 1 … 80 ids: some fill blocks, some do not."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    short = [tokenizer.encode(text).ids for text in BEGINNINGS]
    long = [(3 * one + other)[-80:] for one, other in zip(short, reversed(short), strict=True)]
    return [short[0][:1], *short[1:], *long]


@cache
def engine_of(kernels: str, method: str, depth: int, **settings: Any) -> AnyEngine:
    speculation = {"method": method, "num_speculative_tokens": depth or None, "adaptive": False}
    return make_engine(
        EMBEDDED_MODEL,
        kernels,
        speculative_config=speculation,
        max_model_len=160,
        max_num_seqs=32,
        **settings,
    )


def plain(kernels: str, **settings: Any) -> AnyEngine:
    return engine_of(kernels, "none", 0, **settings)


def params_of(temperature: float, num: int, **more: Any) -> list[SamplingParams]:
    return [
        SamplingParams(seed=7 * i - 5, temperature=temperature, max_tokens=32, **more)
        for i in range(num)
    ]


@cache
def without_drafts(temperature: float) -> Run:
    """Of the 24 prompts, and of the first eight again."""
    return scheduled.run(plain("native"), (2 * prompts())[:32], params_of(temperature, 32))


def iter_positions(verified: list[tuple[int, int]]) -> list[int]:
    """The output positions of each row's drafts."""
    found, position = [], 0
    for num_drafts, num_accepted in verified:
        if num_drafts:
            found.append(position)
        position += num_accepted + 1
    return found

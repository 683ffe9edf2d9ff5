"""Equality of outputs with and without drafts.

Runs the embedded model in the engine, under the scheduler's own core: 200 prompts, one to five
drafts by MTP head and by prompt lookup, greedy and sampled, each prompt alone and 32 at once, in
float32 and bfloat16. Reports the share of identical outputs, and for others the score gap at the
first different token.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from transformers import Qwen2ForCausalLM

from benchmarks.harness import scheduled
from benchmarks.harness.engines import make_engine
from benchmarks.harness.oracle import load_as_qwen2, true_logits
from benchmarks.report import write
from kernels.sample.reference import noise
from models.training.corpus import load_documents, split_documents
from shared.model_folder import EMBEDDED_MODEL
from shared.wire.messages import SamplingParams

DTYPES = ["float32", "bfloat16"]
METHODS = ["mtp", "ngram"]
TEMPERATURES = [0.0, 0.7, 1.0]
AT_ONCE = {"alone": 1, "32 at once": 32}
MAX_PROMPT_LEN = 96


@cache
def prompts_of(num: int) -> list[list[int]]:
    """Prompts held out of the embedded model's training, 1 … 96 ids each."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    _, held_out = split_documents(load_documents())
    ids = tokenizer.encode("\n".join(document.text for document in held_out)).ids
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(ids) - MAX_PROMPT_LEN, num)
    lengths = rng.integers(1, MAX_PROMPT_LEN + 1, num)
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def measure(num_prompts: int, max_tokens: int, depths: list[int], dtypes: list[str]) -> Any:
    prompts = prompts_of(num_prompts)
    return {
        f"{dtype}, {method}": {
            f"temperature {temperature:g}": compare(
                prompts, dtype, method, temperature, depths, max_tokens
            )
            for temperature in TEMPERATURES
        }
        for dtype in dtypes
        for method in METHODS
    }


def compare(
    prompts: list[list[int]],
    dtype: str,
    method: str,
    temperature: float,
    depths: list[int],
    max_tokens: int,
) -> dict[str, dict[str, Any]]:
    """By depth and concurrency: identical outputs, accepted drafts, and the score gap of the two
    tokens at each first difference."""
    params = [
        SamplingParams(seed=index, temperature=temperature, max_tokens=max_tokens)
        for index in range(len(prompts))
    ]
    without = _run(prompts, params, dtype, {"method": "none"}, 32)
    found = {}
    for depth in depths:
        speculation = {"method": method, "num_speculative_tokens": depth, "adaptive": False}
        for name, max_open in AT_ONCE.items():
            done = _run(prompts, params, dtype, speculation, max_open)
            gaps = list(_gaps(prompts, params, without.texts, done.texts))
            found[f"depth {depth}, {name}"] = {
                "texts": len(prompts),
                "same": len(prompts) - len(gaps),
                "right drafts": done.num_accepted,
                "gaps": [round(gap, 6) for gap in gaps],
            }
    return found


@cache
def _engine(dtype: str, speculation: frozenset[tuple[str, Any]]) -> Any:
    settings = {"dtype": dtype, "max_model_len": 256, "max_num_seqs": 32}
    return make_engine(EMBEDDED_MODEL, "native", speculative_config=dict(speculation), **settings)


def _run(
    prompts: list[list[int]],
    params: list[SamplingParams],
    dtype: str,
    speculation: dict[str, Any],
    max_open: int,
) -> scheduled.Run:
    engine = _engine(dtype, frozenset(speculation.items()))
    return scheduled.run(engine, prompts, params, max_open=max_open)


def _gaps(
    prompts: list[list[int]],
    params: list[SamplingParams],
    texts: list[list[int]],
    others: list[list[int]],
) -> Iterator[float]:
    for prompt, each, text, other in zip(prompts, params, texts, others, strict=True):
        if text != other:
            place = next(i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
            ids = prompt + text[:place]
            scores = true_logits(_oracle(), ids)[-1]
            if each.temperature:
                scores = scores / each.temperature + noise(len(scores), each.seed, len(ids), 0)
            yield float(abs(scores[text[place]] - scores[other[place]]))


@cache
def _oracle() -> Qwen2ForCausalLM:
    return load_as_qwen2(EMBEDDED_MODEL)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    args = parser.parse_args()
    write("equality", measure(args.prompts, args.max_tokens, args.depths, args.dtypes))

"""What does a form of weights cost in quality?

Bits per byte of a text, and how far the distribution of each next token is from that of the weights
as they are: the Kullback–Leibler divergence, and how often the likeliest token is the same one.
By the engine that serves, from the logprobs of a prompt, all of the vocabulary. The text is what
the embedded model's training held out, or a file.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.harness.step_engine import run_step
from benchmarks.report import write
from models.training.corpus import load_documents, split_documents
from services.scheduler.scheduler import Scheduler
from services.worker.engine.host import HostEngine
from services.worker.weights.online import ONLINE
from shared.config.worker import WorkerConfig
from shared.messages import (
    ALL_TOKENS,
    Generate,
    Grant,
    NewSequence,
    RunKind,
    SamplingParams,
)
from shared.model_folder import EMBEDDED_MODEL
from shared.token_arrays import Layout, TokenArrays

WORKER = "worker"
UNLIMITED_BYTES = 1 << 60


class Scorer:
    """The weights of ``model`` in the form ``quantization``."""

    def __init__(self, model: Path, dtype: str, quantization: str, max_len: int) -> None:
        settings = {"model": str(model), "dtype": dtype, "quantization": quantization}
        config = WorkerConfig.model_validate(
            settings | {"max_model_len": max_len, "max_num_seqs": 1, "device": "cpu"}
        )
        self._engine = HostEngine(config, lambda text, fraction: None)
        self._core = Scheduler(max_waiting=1, priority_step_s=10, caches_prefixes=False)
        self._core.add_worker(WORKER, self._engine.capacity)
        self._num_scored = 0

    def logprobs(self, ids: np.ndarray) -> np.ndarray:
        """[n − 1, 1 + V] float32 for ids [n]: of each but the first its own, then of all."""
        self._num_scored += 1
        name = str(self._num_scored)
        params = SamplingParams(0, max_tokens=0, prompt_logprobs=ALL_TOKENS)
        generate = Generate(name, 1, params, [NewSequence(name)])
        self._core.add(generate, ids, ids[:0], 0, 0.0)
        self._core.grant(Grant(name, 1, len(ids), UNLIMITED_BYTES))
        found = []
        while self._core.sequences:
            planned = self._core.plan(WORKER)
            assert planned is not None
            result, arrays = run_step(self._engine, planned.plan, planned.ids)
            layout = Layout(result.rows, TokenArrays(*arrays))
            for number, row in enumerate(result.rows):
                if row.run.kind is RunKind.PROMPT and row.run.num_tokens:
                    values = layout.part(number, number + 1).values
                    found.append(values.reshape(row.run.num_tokens, -1))
            self._core.absorb(WORKER, result, arrays)
        return np.concatenate(found)


def pieces(text: str, tokenizer: Tokenizer, length: int, num: int) -> Iterator[np.ndarray]:
    """Up to ``num`` pieces of ``length`` ids, spread over the text."""
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
    num_whole = len(ids) // length
    for number in np.linspace(0, num_whole, min(num, num_whole), endpoint=False, dtype=int):
        yield ids[number * length : (number + 1) * length]


def measure(args: argparse.Namespace) -> dict[str, Any]:
    text = args.text.read_text() if args.text else held_out()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    chosen = list(pieces(text, tokenizer, args.length, args.pieces))
    num_bytes = sum(len(tokenizer.decode(ids[1:].tolist()).encode()) for ids in chosen)
    dense = Scorer(args.model, args.dtype, "none", args.length)
    scorers = {form: Scorer(args.model, args.dtype, form, args.length) for form in ONLINE}
    found: dict[str, list[Comparison]] = {form: [] for form in ("none", *ONLINE)}
    for ids in chosen:
        truth = dense.logprobs(ids)
        found["none"].append(compare(truth, truth))
        for form, scorer in scorers.items():
            found[form].append(compare(truth, scorer.logprobs(ids)))
    text_size = {"tokens": len(chosen) * (args.length - 1), "bytes": num_bytes}
    return {"text": text_size} | {form: summary(each, num_bytes) for form, each in found.items()}


class Comparison(NamedTuple):
    """Of a piece of n tokens."""

    bits: float  # of all its tokens
    divergences: np.ndarray  # [n]
    agrees: np.ndarray  # [n] bool


def compare(truth: np.ndarray, found: np.ndarray) -> Comparison:
    """Of ``found`` to ``truth``, as ``Scorer.logprobs`` returns them."""
    wanted, got = truth[:, 1:], found[:, 1:]
    divergences = (np.exp(wanted, dtype=np.float64) * (wanted - got)).sum(1)
    bits = -float(found[:, 0].sum(dtype=np.float64)) / np.log(2)
    return Comparison(bits, divergences, wanted.argmax(1) == got.argmax(1))


def summary(pieces: list[Comparison], num_bytes: int) -> dict[str, float]:
    divergences = np.concatenate([each.divergences for each in pieces])
    agrees = np.concatenate([each.agrees for each in pieces])
    return {
        "bits per byte": round(sum(each.bits for each in pieces) / num_bytes, 4),
        "KL divergence, mean": round(float(divergences.mean()), 5),
        "same first choice": round(float(agrees.mean()), 4),
    }


def held_out() -> str:
    return "\n".join(each.text for each in split_documents(load_documents())[1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=EMBEDDED_MODEL)
    parser.add_argument("--text", type=Path, metavar="FILE")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--length", type=int, default=512, help="of a piece, in tokens")
    parser.add_argument("--pieces", type=int, default=40)
    write("quality", measure(parser.parse_args()))

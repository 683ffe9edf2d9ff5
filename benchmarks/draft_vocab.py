"""Drafting from a part of the vocabulary: acceptance, tokens per second, and time of the draft
logits.

Runs the embedded model on native code under the scheduler's core, in this process, with prompts
held out of training and a fixed number of drafts. Tokens are ranked by id, and by frequency in the
training texts. Engines take turns; all of them generate the same outputs.
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from benchmarks.harness import scheduled
from benchmarks.harness.engines import AnyEngine
from benchmarks.prompts import held_out_prompts
from benchmarks.report import spread, write
from models.training.corpus import load_documents, split_documents
from services.worker.engine.host import HostEngine
from services.worker.startup.choose_backend import choose_kernels
from services.worker.startup.loaded_model import load
from shared.model_folder import EMBEDDED_MODEL
from shared.settings.worker import WorkerConfig
from shared.wire.messages import SamplingParams

DEPTH = 3
SIZES = (4096, 2048, 1024, 512)
SAMPLING = {"greedy": 0.0, "temperature 1": 1.0}
STREAMS = (1, 8)
HIDDEN_SIZE = 256
NUM_RUNS = 2000


def write_counted(path: Path) -> None:
    """Writes all ids, by descending frequency in the training texts."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    training, _ = split_documents(load_documents())
    counts: Counter[int] = Counter()
    for encoding in tokenizer.encode_batch([document.text for document in training]):
        counts.update(encoding.ids)
    ids = range(tokenizer.get_vocab_size())
    path.write_text(json.dumps(sorted(ids, key=lambda token_id: -counts[token_id])))


def settings_of(speculation: dict[str, Any]) -> WorkerConfig:
    depth = {"num_speculative_tokens": DEPTH, "adaptive": False}
    return WorkerConfig(
        model=EMBEDDED_MODEL,
        device="cpu",
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=max(STREAMS),
        speculative_config={"method": "mtp", **depth, **speculation},
    )


def engines_of(file: Path) -> dict[str, AnyEngine]:
    kinds: dict[str, dict[str, Any]] = {"no drafts": {"method": "none"}, "all tokens": {}}
    for size in SIZES:
        kinds[f"{size} by id"] = {"draft_vocab_size": size}
        kinds[f"{size} by count"] = {"draft_vocab_size": size, "draft_vocab_file": str(file)}
    return {
        name: HostEngine(settings_of(speculation), lambda text, share: None)
        for name, speculation in kinds.items()
    }


def least_us(speculation: dict[str, Any], num_rows: int) -> float:
    """The least of many runs: time of the logits of ``num_rows`` drafts, in microseconds."""
    loaded = load(settings_of(speculation), lambda text, share: None, choose_kernels)
    head = loaded.model.draft_head
    assert head is not None
    out = torch.randn(num_rows, HIDDEN_SIZE)
    times = []
    for _ in range(NUM_RUNS):
        started_s = time.perf_counter()
        head.logits(out)
        times.append(time.perf_counter() - started_s)
    return round(min(times) * 1e6, 1)


def measure(num_prompts: int, num_rounds: int, max_tokens: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counted.json"
        write_counted(file)
        engines = engines_of(file)
    prompts = held_out_prompts()[:num_prompts]
    found: dict[str, Any] = {
        f"logits of {num_rows} drafts, least µs": {
            str(size or "all tokens"): least_us({"draft_vocab_size": size}, num_rows)
            for size in (None, *SIZES)
        }
        for num_rows in STREAMS
    }
    for num_streams in STREAMS:
        for name, temperature in SAMPLING.items():
            params = [
                SamplingParams(
                    seed=seed, temperature=temperature, max_tokens=max_tokens, ignore_eos=True
                )
                for seed in range(num_prompts)
            ]
            point = _point(engines, prompts, params, num_streams, num_rounds)
            found[f"{name} × {num_streams}"] = point
    return found


def _point(
    engines: dict[str, AnyEngine],
    prompts: list[list[int]],
    params: list[SamplingParams],
    num_streams: int,
    num_rounds: int,
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in engines}
    runs: dict[str, scheduled.Run] = {}
    names = list(engines)
    for number in range(num_rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started_s = time.perf_counter()
            found = scheduled.run(engines[name], prompts, params, max_open=num_streams)
            rates[name].append(sum(map(len, found.texts)) / (time.perf_counter() - started_s))
            if found.texts != runs.setdefault(name, found).texts:
                raise RuntimeError(f"{name}: other texts than before")
    if any(each.texts != runs["no drafts"].texts for each in runs.values()):
        raise RuntimeError("texts with drafts are not those without")
    return {
        name: {"tokens/s": spread(rates[name]), "right, by place": _shares(runs[name])}
        for name in names
    }


def _shares(run: scheduled.Run) -> list[float]:
    """Of full chains of drafts, the shares with the first, first two, … drafts accepted."""
    rows = [accepted for num, accepted in chain.from_iterable(run.verified) if num == DEPTH]
    return (
        [round(float(np.mean(np.array(rows) > place)), 3) for place in range(DEPTH)] if rows else []
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=96)
    arguments = parser.parse_args()
    write("draft_vocab", measure(arguments.prompts, arguments.rounds, arguments.max_tokens))

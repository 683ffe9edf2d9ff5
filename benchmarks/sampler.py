"""What does sampling cost on a CPU, by native code and by torch, and what is the ratio?

Rows of normally distributed logits, wide ones as of a model and flat ones, where each token may be
drawn; rounds of both alternate.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.report import spread, write
from kernels.cpu.library import find_variant, load_library
from kernels.cpu.sampler import NativeSampler
from kernels.sample import RandomRows, prepare_random_rows
from kernels.sample.slot_params import host_params
from services.worker.step.sampler import Sampler, TorchSampler

Work = Callable[[Sampler], Any]
DRAWS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {},
    "top_k 50": {"top_k": 50},
    "top_p 0.95": {"top_p": 0.95},
    "min_p 0.05": {"min_p": 0.05},
    "top_n_sigma 1": {"top_n_sigma": 1.0},
}
NUM_LIKELIEST = {"logprobs 0": 0, "logprobs 20": 20, "logprobs of all": None}
DEVIATIONS = {"wide": 4.0, "flat": 0.01}


def random_rows(num: int, **changes: float) -> RandomRows | None:
    params = host_params(num)
    for name, value in ({"temperature": 1.0, "seeds": 7} | changes).items():
        getattr(params, name)[:] = value
    return prepare_random_rows(params, np.full(num, 5), torch.device("cpu"))


def draw(logits: Tensor, **changes: float) -> Work:
    random = random_rows(len(logits), **changes)
    return lambda sampler: sampler.sample(logits, logits, random)


def score(logits: Tensor, num_top: int | None) -> Work:
    rows = np.arange(len(logits))
    tokens = np.random.default_rng(1).integers(0, logits.shape[1], len(logits))
    return lambda sampler: sampler.logprobs(logits, rows, tokens, num_top)


def compare(work: Work, samplers: dict[str, Sampler], num_rounds: int) -> Any:
    """Milliseconds of each, and their ratio round by round; the first round is not counted."""
    runs: dict[str, list[float]] = {name: [] for name in samplers}
    for _ in range(num_rounds + 1):
        for name, sampler in samplers.items():
            started_s = time.perf_counter()
            work(sampler)
            runs[name].append((time.perf_counter() - started_s) * 1e3)
    native, torchs = (runs[name][1:] for name in ("native", "torch"))
    ratios = [one / other for one, other in zip(native, torchs, strict=True)]
    return {"native ms": spread(native), "torch ms": spread(torchs), "ratio": spread(ratios)}


def measure(num_rows: int, vocab_size: int, num_threads: int, num_rounds: int) -> dict[str, Any]:
    variant = find_variant()
    if variant is None:
        raise SystemExit("no native code was built that suits this CPU")
    torch.set_num_threads(max(1, num_threads - 1))  # as the worker does
    native = NativeSampler(load_library(variant), num_threads)
    samplers: dict[str, Sampler] = {"native": native, "torch": TorchSampler()}
    results: dict[str, Any] = {"native code": variant, "rows": num_rows, "vocabulary": vocab_size}
    for kind, deviation in DEVIATIONS.items():
        normal = np.random.default_rng(0).normal(size=(num_rows, vocab_size)) * deviation
        logits = torch.from_numpy(normal.astype(np.float32))
        works = {name: draw(logits, **changes) for name, changes in DRAWS.items()}
        works |= {name: score(logits, num_top) for name, num_top in NUM_LIKELIEST.items()}
        for name, work in works.items():
            results[f"{kind}: {name}"] = compare(work, samplers, num_rounds)
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    write("sampler", measure(chosen.rows, chosen.vocabulary, chosen.threads, chosen.rounds))

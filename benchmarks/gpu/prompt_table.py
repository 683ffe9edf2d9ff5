"""Prompts alone, and prompts that join decoding sequences."""

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.engine_table import PROMPTS_IN_GRAPHS, Engines
from benchmarks.gpu.shapes import prompt_flops
from benchmarks.gpu.suite import Suite
from cli.bench.engine_loop import EngineLoop, Job, Step

NUM_PROMPTS = 5  # per length
NUM_SEQUENCES = 4  # for each open sequence
SEED = 0
TIMES = ("device_s", "engine_s")


def prefill(engines: Engines, product_tflop_per_s: float | None) -> Iterator[dict[str, Any]]:
    """A prompt in one step, by the device's clock; the share is relative to a large GEMM."""
    suite, loop = engines.suite, engines.loop("graphs")
    rng = np.random.default_rng(SEED)
    for num_tokens in suite.prompts:
        jobs = [_job(rng, loop, num_tokens, 1) for _ in range(NUM_PROMPTS)]
        loop.run(jobs[:1], 1, None)
        whole = [s for s in loop.run(jobs, 1, None) if s.num_prompt_tokens == num_tokens]
        device_s, wall_s = (median(getattr(s, name) for s in whole) for name in TIMES)
        tflop_per_s = prompt_flops(suite.model, num_tokens) / device_s / 1e12
        found = {
            "num_tokens": num_tokens,
            "device_ms": device_s * 1e3,
            "wall_ms": wall_s * 1e3,
            "tokens_per_s": num_tokens / device_s,
            "TFLOP_per_s": tflop_per_s,
        }
        if product_tflop_per_s is not None:
            found["share_of_product"] = tflop_per_s / product_tflop_per_s
        yield found


def mixed(engines: Engines) -> Iterator[dict[str, Any]]:
    """Sequences of unequal length, so that a prompt joins whenever one ends: the time per token of
    decoding sequences, over all steps, with a prompt and without. Short prompts also run with
    graphs."""
    suite = engines.suite
    for kind, prompt_len in (
        ("graphs", suite.prompt_len),
        ("graphs", suite.short_prompt_len),
        (PROMPTS_IN_GRAPHS, suite.short_prompt_len),
    ):
        for num_rows in suite.mesh_batches:
            yield {"kind": kind} | _joined(engines, kind, prompt_len, num_rows)


def _joined(engines: Engines, kind: str, prompt_len: int, num_rows: int) -> dict[str, Any]:
    suite, loop = engines.suite, engines.loop(kind)
    reserved = _reserved_mib(suite)
    rng = np.random.default_rng(SEED)
    lens = rng.integers(suite.output_len // 4, suite.output_len, NUM_SEQUENCES * num_rows)
    jobs = [_job(rng, loop, prompt_len, int(num)) for num in lens]
    steps = [s for s in loop.run(jobs, num_rows, None) if s.num_rows > 1 or num_rows == 1]
    joined = [s for s in steps if s.num_prompt_tokens]
    return {
        "num_rows": num_rows,
        "prompt_len": prompt_len,
        "num_steps": len(steps),
        "share_with_prompts": len(joined) / len(steps),
        **_percentiles("", steps),
        **_percentiles("with_prompts_", joined),
        **_percentiles("decode_only_", [s for s in steps if not s.num_prompt_tokens]),
        "tokens_per_s": sum(s.num_decoded for s in steps) / sum(s.engine_s for s in steps),
        "reserved_MiB_before": reserved,
        "reserved_MiB": _reserved_mib(suite),
    }


def _reserved_mib(suite: Suite) -> float:
    """GPU memory reserved by torch: it grows if ever new sizes leave fragments."""
    return torch.cuda.memory_reserved() / (1 << 20) if suite.device.type == "cuda" else 0.0


def _percentiles(name: str, steps: list[Step]) -> dict[str, float]:
    times_ms = [step.engine_s * 1e3 for step in steps]
    shares = {"p50": 50, "p99": 99}
    return {
        f"{name}tpot_{word}_ms": float(np.percentile(times_ms, share))
        for word, share in shares.items()
    }


def _job(rng: np.random.Generator, loop: EngineLoop, num_ids: int, num_tokens: int) -> Job:
    ids = rng.integers(0, loop.model.vocab_size, num_ids)
    return Job(ids.astype(np.int32), num_tokens)

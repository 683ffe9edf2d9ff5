"""Engine steps in this process, two plans in flight, under the scheduler's own core."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.gpu.floor import step_floor_s
from benchmarks.gpu.product_cases import FORMS
from benchmarks.gpu.shapes import write_model
from benchmarks.gpu.suite import Suite
from cli.bench.engine_loop import EngineLoop, Job, Step
from services.worker.engine.device.engine import DeviceEngine
from shared.settings.worker import WorkerConfig

MAX_DEPTH = 3
ACCEPTANCE = 0.8
MAX_KEPT = 2  # engines: three of Qwen3-8B would fill a GPU
SEED = 0
WARM_UP_IDS = 16  # of a prompt: only decoding is measured
PENALTY = 0.5
MTP = {"method": "mtp", "num_speculative_tokens": MAX_DEPTH, "adaptive": False}
DRAFTS_ALL, DRAFTS_SOME = "mtp", "mtp, some tokens"
PROMPTS_IN_GRAPHS = "prompts in graphs"
MORE_SIZES = [256]  # of steps with prompts, besides the batches
OFFLOADED_GB = 1.5  # few layers, because all steps of a point take seconds
# Kinds of engines: the model of the suite, and settings besides the common ones.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "graphs": ("model", {}),
    "eager": ("model", {"enforce_eager": True}),
    PROMPTS_IN_GRAPHS: ("model", {"cudagraph_mode": "full"}),
    DRAFTS_ALL: ("mtp", {"draft_acceptance": ACCEPTANCE, "speculative_config": MTP}),
    DRAFTS_SOME: ("mtp", {"draft_acceptance": ACCEPTANCE}),
    "small": ("small", {}),
    "foreign": ("small", {"model_impl": "transformers"}),
    **{form: ("model", {"quantization": form}) for form in FORMS},
    "offloaded": ("model", {"cpu_offload_gb": OFFLOADED_GB}),
    "offloaded, eager": ("model", {"cpu_offload_gb": OFFLOADED_GB, "enforce_eager": True}),
    "offloaded, wint4": ("model", {"cpu_offload_gb": OFFLOADED_GB / 4, "quantization": "wint4"}),
}


class Point(NamedTuple):
    kind: str  # a key of KINDS
    num_rows: int
    depth: int = 0
    acceptance: float | None = None  # of drafts
    logprobs: int | None = None
    penalises: bool = False  # penalties on emitted tokens


class Engines:
    """Engines built on demand; the least recently used is closed."""

    def __init__(self, suite: Suite, folder: Path) -> None:
        self.suite = suite
        self._folders = {
            name: write_model(folder / name, config) for name, config in suite.models.items()
        }
        self._loops: dict[str, EngineLoop] = {}

    def folder(self, model: str) -> Path:
        return self._folders[model]

    def loop(self, kind: str) -> EngineLoop:
        loop = self._loops.pop(kind, None)
        if loop is None or not loop.is_idle:
            loop = None  # frees its memory for the next one
            self.close(MAX_KEPT - 1)
            loop = EngineLoop(self._settings(kind), DeviceEngine)
        self._loops[kind] = loop  # most recently used last
        return loop

    def close(self, num_kept: int = 0) -> None:
        """Closes all but the ``num_kept`` most recently used engines."""
        for kind in list(self._loops)[: len(self._loops) - num_kept]:
            del self._loops[kind]
        gc.collect()
        if self.suite.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settings(self, kind: str) -> WorkerConfig:
        suite, (model, changes) = self.suite, KINDS[kind]
        if kind == DRAFTS_SOME:
            some = MTP | {"draft_vocab_size": suite.draft_vocab_size}
            changes = changes | {"speculative_config": some}
        more = MORE_SIZES if kind == PROMPTS_IN_GRAPHS else []
        return WorkerConfig(
            model=str(self._folders[model]),
            load_format="dummy",
            device=suite.device.type,
            dtype=str(suite.dtype).removeprefix("torch."),
            max_model_len=suite.max_model_len,
            max_num_seqs=max(suite.batches),
            cudagraph_capture_sizes=[*suite.batches, *more],
            num_gpu_blocks_override=suite.num_blocks,
            **changes,
        )


def run_point(engines: Engines, point: Point) -> list[Step]:
    """All steps of the point, prompts' steps included."""
    suite, loop = engines.suite, engines.loop(point.kind)
    if point.kind in (DRAFTS_ALL, DRAFTS_SOME):
        assert point.acceptance is not None
        loop.speculate(point.depth, point.acceptance)
    rng = np.random.default_rng(SEED)
    prompts = rng.integers(0, loop.model.vocab_size, (point.num_rows, suite.prompt_len))
    penalty = PENALTY if point.penalises else 0.0
    jobs = [
        Job(ids.astype(np.int32), suite.output_len, presence_penalty=penalty) for ids in prompts
    ]
    loop.warm_up([replace(job, ids=job.ids[:WARM_UP_IDS]) for job in jobs], point.logprobs)
    return loop.run(jobs, point.num_rows, point.logprobs)


def measure(engines: Engines, point: Point, read_gb_per_s: float | None) -> dict[str, Any]:
    """Medians of the steps with all rows decoding; rates use the host's time. ``copies_ms`` is the
    time of weight copies alone."""
    suite, steps = engines.suite, run_point(engines, point)
    decoding = [s for s in steps if s.num_rows == point.num_rows and not s.num_prompt_tokens]
    found = _figures(steps, decoding, point)
    copies_s = engines.loop(point.kind).copies_s
    if copies_s:
        times = found["wall_ms"] / 1e3 / copies_s
        return found | {"copies_ms": copies_s * 1e3, "times_the_copies": times}
    if read_gb_per_s is not None and not point.depth and point.kind not in FORMS:
        config = suite.models[KINDS[point.kind][0]]
        context = suite.prompt_len + suite.output_len / 2
        floor_s = step_floor_s(config, suite.dtype.itemsize, point.num_rows, context, read_gb_per_s)
        found |= {"floor_ms": floor_s * 1e3, "share_of_floor": floor_s * 1e3 / found["wall_ms"]}
    return found


def _figures(steps: list[Step], decoding: list[Step], point: Point) -> dict[str, Any]:
    num_decoded, wall_ms = sum(each.num_decoded for each in decoding), _ms(decoding, "engine_s")
    expected = sum((point.acceptance or 0.0) ** draft for draft in range(point.depth + 1))
    return point._asdict() | {
        "num_steps": len(decoding),
        "device_ms": _ms(decoding, "device_s"),
        "idle_ms": _ms(decoding, "idle_s"),
        "wall_ms": wall_ms,
        "wall_p99_ms": float(np.percentile([each.engine_s for each in decoding], 99)) * 1e3,
        "tokens_per_step": num_decoded / len(decoding) / point.num_rows,
        # With the expected number of accepted drafts.
        "expected_tokens_per_s": point.num_rows * expected / wall_ms * 1e3,
        "decode_tokens_per_s": num_decoded / sum(each.engine_s for each in decoding),
        "tokens_per_s": sum(s.num_decoded for s in steps) / sum(s.engine_s for s in steps),
    }


def _ms(steps: list[Step], name: str) -> float:
    return median(getattr(step, name) for step in steps) * 1e3


def points(suite: Suite) -> Iterator[tuple[str, list[Point]]]:
    """Points by section name, most important first."""
    one, *more = suite.batches
    depths = range(MAX_DEPTH + 1)
    yield "batch 1", [Point("graphs", one)]
    yield "batch 1, drafts", [Point(DRAFTS_ALL, one, depth, ACCEPTANCE) for depth in depths]
    yield "batches", [Point("graphs", batch) for batch in more]
    yield (
        "logprobs",
        [Point("graphs", batch, logprobs=num) for batch in suite.batches for num in (0, 20)],
    )
    yield (
        "batches, drafts",
        [Point(DRAFTS_ALL, batch, depth, ACCEPTANCE) for batch in more for depth in depths],
    )
    yield (
        "drafts of some tokens",
        [Point(DRAFTS_SOME, one, depth, ACCEPTANCE) for depth in depths[1:]],
    )
    yield "penalties", [Point("graphs", batch, penalises=True) for batch in suite.batches]
    yield "eager", [Point("eager", batch) for batch in suite.batches]
    yield (
        "other acceptances",
        [Point(DRAFTS_ALL, one, depth, share) for share in (0.6, 0.9) for depth in depths[1:]],
    )
    yield "codes", [Point(form, batch) for form in FORMS for batch in suite.batches]
    offloaded = [kind for kind in KINDS if kind.startswith("offloaded")]
    fewest_and_most = suite.batches[0], suite.batches[-1]
    yield "offloaded", [Point(kind, batch) for kind in offloaded for batch in fewest_and_most]
    yield "small model", [Point("small", batch) for batch in suite.batches]
    yield "small model by transformers", [Point("foreign", batch) for batch in suite.batches]

"""Step times: interpolated between measured steps, or from bytes and FLOPs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

import numpy as np

from cli.plan.cards import Card
from cli.plan.footprint import Footprint
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)  # measured numbers of sequences
PROMPT_LEN, NUM_DECODED = 128, 48  # of each sequence
FIRST_ID = 10


class StepTimes(Protocol):
    """``seconds`` of a step that decodes one token for each of ``num_rows`` sequences, with
    ``num_cached`` tokens in the KV cache in total, and computes ``num_prompt_tokens`` more."""

    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float: ...


@dataclass(frozen=True)
class Point:
    """A measured decode step: its rows, and the tokens of each in the KV cache."""

    num_rows: int
    num_cached: float
    seconds: float


class MeasuredTimes:
    """Interpolates linearly between two points, and proportionally beyond the last. Additional KV
    cache is read at the bandwidth of the weights with one row."""

    def __init__(
        self, points: Sequence[Point], prompt_tokens_per_s: float, footprint: Footprint
    ) -> None:
        self.points = sorted(points, key=lambda each: each.num_rows)
        self.prompt_tokens_per_s = prompt_tokens_per_s
        first = self.points[0]
        bytes_per_s = footprint.read_by(first.num_rows) / first.seconds
        self._kv_s = footprint.kv_per_token / bytes_per_s
        self._rows = [each.num_rows for each in self.points]
        self._seconds = [each.seconds for each in self.points]
        self._cached = [each.num_cached for each in self.points]

    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float:
        decode_s = self._decode_s(num_rows, num_cached) if num_rows else 0.0
        return decode_s + num_prompt_tokens / self.prompt_tokens_per_s

    def _decode_s(self, num_rows: int, num_cached: int) -> float:
        last = self._rows[-1]
        seconds = float(np.interp(num_rows, self._rows, self._seconds)) * max(1.0, num_rows / last)
        counted = num_rows * float(np.interp(num_rows, self._rows, self._cached))
        return seconds + max(0.0, num_cached - counted) * self._kv_s


@dataclass(frozen=True)
class RooflineTimes:
    """The larger of reading and computing time, at ``efficiency`` of a GPU's bandwidth and
    throughput; ``num_cards`` share both evenly."""

    footprint: Footprint
    card: Card
    efficiency: float
    num_cards: int = 1

    def seconds(self, num_rows: int, num_cached: int, num_prompt_tokens: int) -> float:
        num_tokens = num_rows + num_prompt_tokens
        num_bytes = self.footprint.read_by(num_tokens) + num_cached * self.footprint.kv_per_token
        operations = 2 * self.footprint.parameters.active * num_tokens
        share = self.efficiency * self.num_cards
        reading_s = num_bytes / (self.card.gb_per_s * 1e9 * share)
        return max(reading_s, operations / (self.card.tflops * 1e12 * share))


@dataclass(frozen=True)
class MeshTimes:
    """Time added by gateway, tokenizer, scheduler and clients to a plan and to each token, if they
    share all cores with the worker."""

    plan_s: float
    token_s: float

    def seconds(self, num_tokens: int) -> float:
        return self.plan_s + self.token_s * num_tokens


ON_SHARED_CORES = MeshTimes(0.4e-3, 0.1e-3)
"""Fitted to loads of four models on two Zen 5 cores; docs/planning.md has the accuracy."""
ON_CORES_OF_ITS_OWN = MeshTimes(0.0, 0.0)


def measure(settings: WorkerConfig, footprint: Footprint, max_rows: int) -> MeasuredTimes:
    """Runs the engine on this machine for some seconds, without drafts, with plans as long as a
    server's. Raises ConfigError."""
    from cli.bench.engine_loop import EngineLoop, Job

    loop = EngineLoop(settings, takes_several_steps=True)
    ids = np.random.default_rng(0).integers(
        FIRST_ID, loop.model.vocab_size, (ROWS[-1], PROMPT_LEN), dtype=np.int32
    )
    points, rates = [], []
    for num_rows in [each for each in ROWS if each <= min(max_rows, loop.capacity.max_num_seqs)]:
        jobs = [Job(each, NUM_DECODED) for each in ids[:num_rows]]
        if num_rows == 1:
            loop.run(jobs, 1, None)  # warm-up: a worker's first plans are short
        steps = loop.run(jobs, num_rows, None)
        decode = [step.engine_s / step.num_steps for step in steps if not step.num_prompt_tokens]
        prompt = [step for step in steps if step.num_prompt_tokens]
        points.append(Point(num_rows, PROMPT_LEN + NUM_DECODED / 2, median(decode)))
        seconds = sum(step.engine_s for step in prompt)
        rates.append(sum(step.num_prompt_tokens for step in prompt) / seconds)
    return MeasuredTimes(points, max(rates), footprint)


def read_measured(paths: Sequence[Path], footprint: Footprint) -> MeasuredTimes:
    """Takes the points from results of ``shoal bench engine --json``. Raises ConfigError."""
    points, rates = [], []
    for path in paths:
        try:
            found = json.loads(path.read_text())
            load, report = found["settings"], found["figures"]
            cached = float(load["input_len"]) + float(load["output_len"]) / 2
            seconds = report["step_ms"]["decode"]["p50"] / 1e3
            points.append(Point(load["concurrency"], cached, seconds))
            rates.append(report["prefill_tokens_per_s"] or 0.0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"--measured: {path} is no result of `shoal bench engine --json` with fixed"
                f" lengths: {type(error).__name__} {error}"
            ) from None
    if not max(rates):
        raise ConfigError("--measured: no file has a rate of prefill")
    return MeasuredTimes(points, max(rates), footprint)

"""A worker on a simulated clock, with the time of each step given by its rows."""

from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks.harness.sequences import add_one
from services.scheduler.scheduler import Planned, Scheduler
from services.scheduler.worker_state import PROBATION_STEPS
from shared.wire.envelope import Promise
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(num_blocks=40_000, block_size=16, max_num_seqs=64,
                    max_num_batched_tokens=512, max_model_len=32_000)  # fmt: skip
SHARE = 0.2
LATER = "batch"


def on_a_cpu(num_prompt: int, num_decode: int) -> float:
    """Seconds of a step: each row costs."""
    return 0.002 + 0.0005 * num_decode + 0.00015 * num_prompt


def on_a_gpu(num_prompt: int, num_decode: int) -> float:
    """More rows cost nothing compared with the weights, but a long prompt does."""
    return max(0.01, 0.00005 * (num_prompt + num_decode))


class Bench:
    """One worker on a simulated clock. ``times`` has the seconds of each step with an earlier
    sequence, with True if it also had a later one; ``rows`` the tokens of prompts, decoding rows
    and seconds of each step. A plan takes ``plan_s`` in addition to its steps."""

    def __init__(
        self,
        cost: Callable[[int, int], float],
        depth: int = 2,
        plan_s: float = 0.0,
        stream_rate: float = 0.5,
        **fields: Any,
    ) -> None:
        self.core = Scheduler(
            1000, 10, pipeline_depth=depth, priority_share=SHARE, stream_rate=stream_rate
        )
        self.capacity = msgspec.structs.replace(CAPACITY, **fields)
        self.core.add_worker("w", self.capacity, PROBATION_STEPS)
        self.worker = SimulatedWorker(self.capacity)
        self.now_s = 0.0
        self.times: list[tuple[float, bool]] = []
        self.rows: list[tuple[int, int, float]] = []
        self.tokens: list[int] = []  # of later sequences, in each plan
        self.ended: list[str] = []
        self._cost, self._plan_s = cost, plan_s
        self._num_added = 0
        self._planned: list[Planned] = []

    def add(
        self,
        name: str,
        num_prompt: int = 20,
        max_tokens: int = 20_000,
        priority: int = 0,
        promise: Promise | None = None,
        owner: str = "",
    ) -> None:
        self._num_added += 1
        start = 100_000 * self._num_added
        params = SamplingParams(seed=0, max_tokens=max_tokens)
        prompt = range(start, start + num_prompt)
        add_one(
            self.core,
            name,
            prompt,
            params,
            self.now_s,
            priority=priority,
            promise=promise,
            owner=owner,
        )
        sequence = self.core.sequences[name, 1]
        sequence.max_emitted = sequence.max_bytes = 1 << 40

    def add_batch(self, num: int, num_prompt: int = 20, max_tokens: int = 20_000) -> None:
        for number in range(num):
            self.add(f"{LATER} {number}", num_prompt, max_tokens, priority=100)

    def step(self) -> None:
        while planned := self.core.plan("w"):
            self._planned.append(planned)
            self._note(planned)
        planned = self._planned.pop(0)
        result, arrays = self.worker.step(planned)
        step_s = self._seconds(planned) * result.num_steps
        self.now_s += step_s
        for emission in self.core.absorb(
            "w", msgspec.structs.replace(result, step_s=step_s), arrays
        ):
            if emission.ends:
                self.ended.append(emission.sequence.request)

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.step()

    def _seconds(self, planned: Planned) -> float:
        """Seconds of each of its steps."""
        num_prompt = sum(row.num_tokens for row in planned.plan.prefill)
        step_s = self._cost(num_prompt, len(planned.plan.decode))
        return step_s + self._plan_s / planned.plan.num_steps

    def _note(self, planned: Planned) -> None:
        running = self.core.workers["w"].running
        tokens = {row.slot: row.num_tokens for row in planned.plan.prefill}
        tokens |= {row.slot: 1 for row in planned.plan.decode}
        later = {slot for slot in tokens if running[slot].options.priority}
        num_prompt = sum(row.num_tokens for row in planned.plan.prefill)
        step = (num_prompt, len(planned.plan.decode), self._seconds(planned))
        self.rows += [step] * planned.plan.num_steps
        self.tokens.append(sum(tokens[slot] for slot in later))
        if tokens.keys() - later:
            self.times += [(self._seconds(planned), bool(later))] * planned.plan.num_steps

    def slowdown(self) -> float:
        """The mean of the last steps with an earlier sequence, relative to steps without later
        ones."""
        alone = [step_s for step_s, is_joined in self.times if not is_joined]
        return sum(step_s for step_s, _ in self.times) / len(self.times) / min(alone)

    @property
    def num_joined(self) -> int:
        return sum(is_joined for _, is_joined in self.times)

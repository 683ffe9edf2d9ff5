"""Meshes of cells in virtual time."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.harness.cells import Cell, Clock, Job, Outcome, StepSeconds, Timeline
from shared.wire.messages import Capacity

SPREAD = 0.05  # of the workers' step times, so that they do not stay in step


@dataclass(frozen=True)
class Shape:
    """Of a mesh: workers of all cells together, and what each holds."""

    num_workers: int
    num_slots: int
    num_cells: int = 1
    step_s: float = 0.025
    prompt_token_s: float = 20e-6
    max_num_batched_tokens: int = 2048
    num_blocks: int = 8192
    num_routes: int = 4


class Mesh:
    """Cells with disjoint workers; jobs go to them in turn. With ``refills`` another job comes in
    the place of each that ends, of those that ``make_job`` makes."""

    def __init__(
        self, shape: Shape, clock: Clock, make_job: Callable[[], Job], refills: bool = False
    ) -> None:
        self.timeline = Timeline()
        self.refills = refills
        self._make_job = make_job
        self.cells = [
            Cell(self.timeline, clock, shape.num_routes, self._on_end)
            for _ in range(shape.num_cells)
        ]
        self._num_arrived = 0
        random = Random(0)
        capacity = Capacity(
            shape.num_blocks, 16, shape.num_slots, shape.max_num_batched_tokens, 1 << 16
        )
        for number in range(shape.num_workers):
            factor = 1 + SPREAD * random.uniform(-1, 1)
            times = StepSeconds(factor * shape.step_s, shape.prompt_token_s)
            self.cells[number % shape.num_cells].add_worker(f"w{number}", capacity, times)

    def arrive(self, job: Job | None = None) -> None:
        cell = self.cells[self._num_arrived % len(self.cells)]
        self._num_arrived += 1
        cell.arrive(job or self._make_job(), self.timeline.now_s)

    def arrive_at(self, at_s: float) -> None:
        self.timeline.at(at_s, lambda now_s: self.arrive())

    def run_steps(self, num: int) -> None:
        """So many more."""
        num += self.num_steps
        while self.num_steps < num and self.timeline.next():
            pass

    def run_until(self, end_s: float) -> None:
        while self.timeline.now_s < end_s and self.timeline.next():
            pass

    def forget_costs(self) -> None:
        for cell in self.cells:
            cell.forget_costs()

    @property
    def num_steps(self) -> int:
        return sum(cell.num_steps for cell in self.cells)

    @property
    def busy_s(self) -> float:
        """Of all cells."""
        return sum(cell.busy_s for cell in self.cells)

    @property
    def outcomes(self) -> list[Outcome]:
        return [outcome for cell in self.cells for outcome in cell.outcomes.values()]

    def _on_end(self, cell: Cell) -> None:
        if self.refills:
            cell.arrive(self._make_job(), self.timeline.now_s)

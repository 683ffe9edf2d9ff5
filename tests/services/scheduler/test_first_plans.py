"""The first plan of an idle worker."""

import asyncio
from pathlib import Path

from services.scheduler.service import SchedulerService
from shared.settings.scheduler import SchedulerConfig
from shared.wire.messages import (
    Capacity,
    Generate,
    ModelInfo,
    NewSequence,
    StepPlan,
    StepResult,
)
from tests.mesh.arena_parts import NO_ARRAYS, NO_IDS, PLAIN, PROMPT, FakePeer, connect

CAPACITY = Capacity(32, 4, 4, 16, 64, 1000)


async def with_a_prompt(folder: Path, pipeline_depth: int) -> tuple[SchedulerService, FakePeer]:
    """A service and its idle worker, with a newly arrived prompt."""
    config = SchedulerConfig(mesh_dir=folder, instance="s", pipeline_depth=pipeline_depth)
    service = SchedulerService(config)
    tokenizer = connect("tokenizer", ModelInfo(["m"], "f", 1000, 64, 1))
    worker = connect("worker", None, CAPACITY)
    service.on_up(tokenizer)
    service.on_up(worker)
    await asyncio.sleep(0)
    generate = Generate("r~1/0", 1, PLAIN, [NewSequence("r~1/0/0")])
    service.on_message(tokenizer, generate, [PROMPT, NO_IDS])
    return service, worker


async def test_an_idle_worker_has_its_first_plan_before_the_second_is_made(tmp_path: Path) -> None:
    service, worker = await with_a_prompt(tmp_path, pipeline_depth=2)
    await asyncio.sleep(0)  # messages of a turn are sent before the next one
    [(first, _)] = worker.take(StepPlan)
    await asyncio.sleep(0)
    assert len(worker.take(StepPlan)) == 1
    service.on_message(worker, StepResult(first.step, []), NO_ARRAYS)
    assert len(worker.take(StepPlan)) == 1, "it computes the second one meanwhile"


async def test_nobody_is_looked_at_again_where_one_plan_is_all(tmp_path: Path) -> None:
    service, worker = await with_a_prompt(tmp_path, pipeline_depth=1)
    await asyncio.sleep(0)
    assert len(worker.take(StepPlan)) == 1
    assert not service._is_planning_due

"""Only a worker with an overdue result is reported."""

from benchmarks.harness.sequences import add_one
from services.scheduler.scheduler import Scheduler
from services.scheduler.worker_state import LOOK_S, Watchdog
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.simulated_worker import SimulatedWorker

CAPACITY = Capacity(16, 4, 4, 8, 64, stall_s=2 * LOOK_S)


def test_only_a_worker_whose_oldest_plan_stays_without_result_is_found():
    core = Scheduler(max_waiting=10, priority_step_s=10)
    works = SimulatedWorker(CAPACITY)
    for worker_id in ("works", "hangs", "idle"):
        core.add_worker(worker_id, CAPACITY)
    for name in ("a", "b"):
        params = SamplingParams(seed=0, max_tokens=40)
        add_one(core, name, range(3), params)
    watchdog = Watchdog(core.workers)
    assert core.plan("hangs")
    found = []
    for _ in range(6):
        planned = core.plan("works")
        found.append(watchdog.look())
        core.absorb("works", *works.step(planned))
    assert found == [[], [], [], [], ["hangs"], ["hangs"]]
    core.remove_worker("hangs", 0)
    core.add_worker("hangs", CAPACITY)
    assert watchdog.look() == []

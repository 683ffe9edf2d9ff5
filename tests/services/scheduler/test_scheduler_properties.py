"""Random arrivals, cancels and worker deaths: the contract holds and every sequence finishes."""

import json
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness.sequences import add_one
from services.scheduler.prefills import PrefillLimits
from services.scheduler.scheduler import Scheduler
from shared.wire.messages import Capacity, SamplingParams
from tests.services.scheduler.schedules import run_schedule
from tests.services.scheduler.simulated_worker import SimulatedWorker

ROOT = Path(__file__).parent.parent.parent.parent
NUM_SCHEDULES = 80
RARE = (126, 169)  # a sequence is overtaken, and one is given up
NUM_PIECES, PIECE = 40, 2500  # 100,000 schedules, a quarter of a minute per piece


def progress_file() -> Path:
    """The pieces that have passed with the current code."""
    folders = ROOT / "services" / "scheduler", Path(__file__).parent
    files = sorted(file for folder in folders for file in folder.glob("*.py"))
    digest = sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
    return ROOT / ".cache" / f"schedules-{digest}.json"


@pytest.mark.seconds
def test_random_schedules_keep_the_contract_and_reach_their_events() -> None:
    met: Counter[str] = Counter()
    for number in (*range(NUM_SCHEDULES), *RARE):
        mesh = run_schedule(number)
        met.update(
            preemptions=mesh.core.planner.preemption.num,
            requeues=mesh.core.num_requeues,
            cached=mesh.core.num_prefix_hits,
            given_up=mesh.num_given_up,
            abandoned=mesh.num_abandoned,
            siblings=mesh.num_siblings,
            overtaken=mesh.num_overtaken,
            accepted=mesh.num_accepted,
            rejected=mesh.num_rejected,
            long_plans=mesh.num_long_plans,
            long_beside=mesh.num_long_beside,
            cut_short=mesh.num_cut_short,
            held_back=mesh.num_held_back,
            joined=mesh.num_joined,
            beside=mesh.num_beside,
            in_turn=mesh.num_in_turn,
        )
        met[f"depth {mesh.depth}"] += 1
    assert len(met) == 18
    assert all(met.values()), met


@pytest.mark.slow
@pytest.mark.parametrize("piece", range(NUM_PIECES))
def test_100000_schedules_keep_the_contract(piece: int) -> None:
    """Skips pieces passed with the same code, so that an interrupted run resumes."""
    file = progress_file()
    passed = json.loads(file.read_text()) if file.exists() else []
    if piece in passed:
        pytest.skip(f"passed with this code before: {file}")
    for number in range(piece * PIECE, (piece + 1) * PIECE):
        run_schedule(number)
    file.parent.mkdir(exist_ok=True)
    whole = file.with_suffix(".new")
    whole.write_text(json.dumps([*passed, piece]))
    whole.replace(file)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.integers(2, 16))
@settings(max_examples=100)
def test_sequences_start_in_the_order_they_came(lengths: list[int], budget: int) -> None:
    capacity = Capacity(64, 4, 2, budget, 64)
    limits = PrefillLimits(long_threshold=64)  # none is long, or others would overtake it
    core = Scheduler(max_waiting=100, priority_step_s=1, prefill_limits=limits)
    core.add_worker("w", capacity)
    worker = SimulatedWorker(capacity)
    for index, length in enumerate(lengths):
        params = SamplingParams(seed=0, max_tokens=3)
        add_one(core, f"r{index}", [1] * length, params)
    started: list[str] = []
    while core.sequences:
        planned = core.plan("w")
        started += [admit.request for admit in planned.plan.admit]
        core.absorb("w", *worker.step(planned))
    assert started == [f"r{index}" for index in range(len(lengths))]

"""How far does one scheduler go, and how far do several?

The scheduler's core and codec in virtual time (``harness/cells.py``): workers answer after a step's
time, and what the scheduler computes takes as long there as it took this process. In the rows of
first tokens sequences come at random; in all others slots are full, and another sequence comes for
each that ends. Real processes at last show what the simulation leaves out.
"""

import argparse
import asyncio
import gc
import os
import time
from collections.abc import Callable
from random import Random
from statistics import median
from typing import Any

from benchmarks.growth_mesh import measure_mesh
from benchmarks.growth_plot import plot
from benchmarks.harness.cells import Clock, Job
from benchmarks.harness.simulated_mesh import Mesh, Shape
from benchmarks.processes import own_bytes
from benchmarks.report import write
from services.scheduler.worker_state import PROBATION_STEPS

NUM_RUNNING = 10  # on each worker
NUMS_WORKERS = (1, 10, 30, 100, 300, 1000)
SOME_WORKERS = 30  # where the number of those that run or wait changes
NUMS_RUNNING = (1, 10, 32, 100, 300)
NUMS_WAITING = (0, 1000, 10_000, 100_000)
NUMS_LONG = (100, 1000, 10_000)
NUMS_CELLS = {  # and with how many workers
    1: (10, 30, 100, 150, 200, 300, 1000),
    4: (100, 300, 600, 1000),
    16: (300, 1000),
}
STEP_TIMES_MS = (10, 25, 50, 100)
PROMPT_LEN, LONG_PROMPT_LEN = 64, 3000
MEAN_TOKENS = 100  # of output
NUM_PARTS = 5  # of a row: their median counts
NUM_STEPS = 800  # of a part, and one of each worker at least
OPEN_SLOTS, LOAD = 16, 0.6  # of a worker where first tokens are measured, and how many are in use
SETTLING_STEPS, OPEN_STEPS = 8, 24  # of each worker

Figures = dict[str, Any]


def jobs(prompt_len: int = PROMPT_LEN) -> Callable[[], Job]:
    """Makes jobs with outputs of all lengths up to twice the mean."""
    random = Random(1)
    return lambda: Job(prompt_len, random.randint(1, 2 * MEAN_TOKENS - 1))


def full(shape: Shape, num_waiting: int, waiting_len: int = PROMPT_LEN) -> Mesh:
    """A mesh with all slots in use whose workers have proven themselves, and so many that wait."""
    mesh = Mesh(shape, time.process_time, jobs(), refills=True)
    for _ in range(shape.num_workers * shape.num_slots):
        mesh.arrive()
    mesh.run_steps(shape.num_workers * (PROBATION_STEPS + 2))
    make_waiting = jobs(waiting_len)
    for _ in range(num_waiting):
        mesh.arrive(make_waiting())
    mesh.run_steps(2 * shape.num_workers)
    mesh.forget_costs()
    return mesh


def cost(
    num_workers: int, num_running: int, num_waiting: int, prompt_len: int, num_routes: int = 4
) -> Figures:
    """What steps of a full mesh take."""
    shape = Shape(num_workers, num_running, num_routes=num_routes)
    mesh = full(shape, num_waiting, prompt_len)
    parts_us: list[float] = []
    plans: list[float] = []
    for _ in range(NUM_PARTS):
        mesh.forget_costs()
        mesh.run_steps(max(NUM_STEPS, num_workers))
        parts_us.append(1e6 * mesh.busy_s / mesh.num_steps)
        plans += [seconds for cell in mesh.cells for seconds in cell.plan_s]
    step_us = median(parts_us)
    plans.sort()
    return {
        "CPU us/step": round(step_us, 1),
        "CPU us/sequence and step": round(step_us / num_running, 2),
        "plan us, median": round(1e6 * median(plans), 1),
        "plan us, 99 %": round(1e6 * plans[len(plans) * 99 // 100], 1),
        "steps/s of a core": round(1e6 / step_us),
        "workers of a core": {
            f"steps of {each} ms": round(each * 1e3 / step_us) for each in STEP_TIMES_MS
        },
    }


def costs() -> Figures:
    """By workers, by those that run, by those that wait, and by those that wait and are long."""
    some, few, short = SOME_WORKERS, NUMS_WAITING[1], PROMPT_LEN
    return {
        "workers": {num: cost(num, NUM_RUNNING, few, short) for num in NUMS_WORKERS},
        "running": {num: cost(some, num, few, short) for num in NUMS_RUNNING},
        "waiting": {num: cost(some, NUM_RUNNING, num, short) for num in NUMS_WAITING},
        "long": {num: cost(some, NUM_RUNNING, num, LONG_PROMPT_LEN) for num in NUMS_LONG},
    }


def simulated(num_workers: int, num_running: int) -> Figures:
    """As real processes are measured: one tokenizer, and nobody waits."""
    return cost(num_workers, num_running, 0, PROMPT_LEN, num_routes=1)


def memory(num_waiting: int) -> Figures:
    """What sequences that wait hold, and how long a search for garbage among them takes."""
    mesh = full(Shape(1, NUM_RUNNING), 0)
    gc.collect()
    before, began = own_bytes(os.getpid()), time.process_time()
    for _ in range(num_waiting):
        mesh.arrive()
    arrived = time.process_time()
    gc.collect()
    return {
        "bytes/waiting sequence": round((own_bytes(os.getpid()) - before) / num_waiting),
        "arrival, us": round(1e6 * (arrived - began) / num_waiting, 1),
        "search for garbage, ms": round(1e3 * (time.process_time() - arrived), 1),
    }


def first_tokens(num_workers: int, num_cells: int, clock: Clock) -> Figures:
    """From arrival to first token; of sequences that have none yet, until the end."""
    shape = Shape(num_workers, OPEN_SLOTS, num_cells)
    random, mesh = Random(2), Mesh(shape, clock, jobs(), refills=True)
    num_open = round(LOAD * num_workers * OPEN_SLOTS)
    for _ in range(num_open):
        mesh.arrive()
    mesh.run_steps(num_workers * (PROBATION_STEPS + SETTLING_STEPS))
    mesh.refills = False
    mesh.forget_costs()
    settled_s = at_s = mesh.timeline.now_s
    end_s = settled_s + OPEN_STEPS * shape.step_s
    rate = num_open / (MEAN_TOKENS * shape.step_s)
    while (at_s := at_s + random.expovariate(rate)) < end_s:
        mesh.arrive_at(at_s)
    mesh.run_until(end_s)
    came = [each for each in mesh.outcomes if each.arrived_s > settled_s]
    delays = sorted((each.first_s or end_s) - each.arrived_s for each in came)
    return {
        "workers": num_workers,
        "cells": num_cells,
        "arrivals/s": round(rate),
        "share of each core": round(mesh.busy_s / num_cells / (end_s - settled_s), 2),
        "first token ms, median": round(1e3 * median(delays), 1),
        "first token ms, 99 %": round(1e3 * delays[len(delays) * 99 // 100], 1),
    }


def measure() -> Figures:
    gc.freeze()  # as services do when they are ready
    return {
        "memory": memory(NUMS_WAITING[-1]),
        "costs by": costs(),
        "first tokens": [
            first_tokens(num_workers, num_cells, time.process_time)
            for num_cells, nums_workers in NUMS_CELLS.items()
            for num_workers in nums_workers
        ],
        "first tokens, a scheduler that takes no time": first_tokens(100, 1, lambda: 0.0),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    results = measure()
    results["real processes"] = asyncio.run(measure_mesh(simulated))
    write("growth", results)
    plot(results)

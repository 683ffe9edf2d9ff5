"""The cost of adapters in decoding: tokens/s of an engine that computes none, of one without rows
that have them, and with 1, 4 and 8 different ones among its rows; also while others are added.

Models of ``benchmarks.checkpoints`` in bfloat16; adapters change all linear layers, and of the
models after ``--everywhere`` also routed experts, routers, the embedding and the head. Every run
decodes the same sequences in plans of four steps. Rounds of all configurations alternate, in one
process. Time is the CPU time of the thread that steps: other processes count little.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from threading import Event, Thread, get_native_id
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import checkpoint
from benchmarks.harness.engines import make_engine
from benchmarks.harness.step_engine import run_step
from benchmarks.report import spread, write
from services.worker.adapters.addition import Adapters
from services.worker.adapters.sites import LoadedAdapter, LowRank, layer_shapes
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import Admit, Decode, Prefill, SamplingParams, StepPlan

PROMPT, NUM_STEPS, MAX_LEN = 32, 4, 512
NO_IDS = np.zeros(0, np.int32)
PLAIN, UNUSED = "disabled", "no rows"


def make_adapter(adapters: Adapters, number: int, rank: int, everywhere: bool) -> LoadedAdapter:
    """Random, and too weak to make the model's numbers large."""
    sites = [site for site in adapters.sites if everywhere or site.is_common]
    generator = torch.Generator().manual_seed(number)

    def numbers(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * 0.01).to(adapters.dtype)

    layers = {
        name: LowRank(numbers(rank, inputs), numbers(outputs, rank))
        for name, (outputs, inputs) in layer_shapes(sites).items()
        if not name.endswith(".gate_up_proj")  # an expert's gates and ups have their own names
    }
    return LoadedAdapter(f"{number:032x}", rank, 0, layers)


def decode(engine: Any, digests: Sequence[str], num_plans: int) -> float:
    """Tokens per CPU second of one sequence for each of ``digests``."""
    engine.reset()
    num, size = len(digests), engine.capacity.block_size
    params = SamplingParams(seed=0, temperature=0.0, max_tokens=MAX_LEN, ignore_eos=True)
    blocks = np.arange(num * (MAX_LEN // size)).reshape(num, -1).tolist()
    admits = [
        Admit(
            slot, f"{slot}", 1, 0, 0, PROMPT, PROMPT, 0, params, blocks[slot],
            options=write_options(RequestOptions(adapter=digest)),
        )
        for slot, digest in enumerate(digests)
    ]  # fmt: skip
    ids = np.random.default_rng(0).integers(8, 4000, num * PROMPT).astype(np.int32)
    rows = [Prefill(slot, PROMPT) for slot in range(num)]
    run_step(engine, StepPlan(1, [], admits, [], rows, []), ids)
    continued = [Decode(slot) for slot in range(num)]
    started_s, num_tokens = time.thread_time(), 0
    for step in range(num_plans):
        plan = StepPlan(2 + step, [], [], [], [], continued, 0, NUM_STEPS)
        _, arrays = run_step(engine, plan, NO_IDS)
        num_tokens += len(arrays.ids)
    return num_tokens / (time.thread_time() - started_s)


@contextmanager
def adding(adapters: Adapters, more: Sequence[LoadedAdapter]) -> Iterator[list[float]]:
    """Adds and removes adapters on a thread of low priority, over and over; yields the times in
    s."""
    is_over, times_s = Event(), list[float]()

    def work() -> None:
        os.setpriority(os.PRIO_PROCESS, get_native_id(), 19)
        while not is_over.is_set():
            for each in more:
                started_s = time.perf_counter()
                adapters.table.add(each)
                times_s.append(time.perf_counter() - started_s)
                adapters.table.remove(each.digest)

    thread = Thread(target=work)
    thread.start()
    try:
        yield times_s
    finally:
        is_over.set()
        thread.join()


def measure(name: str, num_rows: int, args: argparse.Namespace) -> Any:
    rank, threads, rounds, plans = args.rank, args.threads, args.rounds, args.plans
    settings = {"dtype": "bfloat16", "num_threads": threads, "max_num_seqs": num_rows}
    settings |= {"max_model_len": MAX_LEN}
    model, everywhere = checkpoint(name), name in args.everywhere
    plain = make_engine(model, "native", **settings)
    engine = make_engine(
        model, "native", **settings, enable_lora=True, max_lora_rank=rank, max_loras=num_rows
    )
    (adapters,) = engine.additions
    numbers = range(1, num_rows + 3)
    made = [make_adapter(adapters, number, rank, everywhere) for number in numbers]
    for each in made[:num_rows]:
        adapters.table.add(each)
    digests = [each.digest for each in made]
    runs: dict[str, Callable[[], float]] = {
        PLAIN: lambda: decode(plain, [""] * num_rows, plans),
        UNUSED: lambda: decode(engine, [""] * num_rows, plans),
    }
    for num in sorted({1, num_rows // 2, num_rows}):
        runs[f"{num} adapters"] = lambda num=num: decode(  # type: ignore[misc]
            engine, [digests[row % num] for row in range(num_rows)], plans
        )
    add_s: list[float] = []

    def while_adding() -> float:
        with adding(adapters, made[num_rows:]) as times_s:
            found = decode(engine, digests[:num_rows], plans)
        add_s.extend(times_s)
        return found

    runs[f"{num_rows} adapters, others are added"] = while_adding
    for run in runs.values():
        run()
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            found[name].append(run())
    return {
        "tokens/s": {name: spread(each) for name, each in found.items()},
        f"share of {PLAIN}": {
            name: spread([one / other for one, other in zip(each, found[PLAIN], strict=True)])
            for name, each in found.items()
        },
        "adding an adapter, ms": round(1000 * median(add_s), 1),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--streams", nargs="+", type=int, default=[8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--plans", type=int, default=16, help="of four steps each")
    parser.add_argument("--everywhere", nargs="+", default=[], metavar="MODEL")
    args = parser.parse_args()
    write(
        "adapters",
        {
            f"{model} × {num}, rank {args.rank}, {args.threads} threads": measure(model, num, args)
            for model in args.models
            for num in args.streams
        },
    )

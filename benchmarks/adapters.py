"""The cost of adapters in decoding: tokens/s of an engine that computes none, of one without rows
that have them, and with 1, 4 and 8 different ones among its rows; also while others are added.

Models of ``benchmarks.checkpoints`` in bfloat16; adapters change all linear layers, and of the
models after ``--everywhere`` also routed experts, routers, the embedding and the head. Plans of
four steps of all configurations alternate, in one process.
"""

import argparse
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints import checkpoint
from benchmarks.harness.engines import make_engine
from benchmarks.harness.step_engine import run_step
from benchmarks.report import spread, write
from services.worker.adapters.addition import Adapters
from services.worker.adapters.sites import LoadedAdapter, LowRank, layer_shapes
from shared.process.cores import lower_priority
from shared.wire.envelope import RequestOptions, write_options
from shared.wire.messages import Admit, Decode, Prefill, SamplingParams, StepPlan

PROMPT, NUM_STEPS, MAX_LEN = 32, 4, 256
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


class Streams:
    """Sequences of an engine, one for each of ``digests`` of a group; each group decodes apart."""

    def __init__(self, engine: Any, groups: Sequence[Sequence[str]]) -> None:
        self._engine, self._step = engine, 1
        digests = [digest for group in groups for digest in group]
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

    def decode(self, slots: range) -> float:
        """Tokens per second of a plan."""
        self._step += 1
        rows = [Decode(slot) for slot in slots]
        started_s = time.perf_counter()
        plan = StepPlan(self._step, [], [], [], [], rows, 0, NUM_STEPS)
        _, arrays = run_step(self._engine, plan, NO_IDS)
        return len(arrays.ids) / (time.perf_counter() - started_s)


@contextmanager
def adding(adapters: Adapters, more: Sequence[LoadedAdapter]) -> Iterator[list[float]]:
    """Adds and removes adapters over and over, on a thread of the priority that loading has; yields
    the times in s."""
    is_over, times_s = Event(), list[float]()

    def work() -> None:
        lower_priority()
        while more and not is_over.is_set():
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
    rank, everywhere = args.rank, name in args.everywhere
    settings = {"dtype": "bfloat16", "num_threads": args.threads, "max_model_len": MAX_LEN}
    model, counts = checkpoint(name), sorted({1, num_rows // 2, num_rows})
    settings |= {"max_num_seqs": num_rows * (len(counts) + 2)}
    plain = Streams(make_engine(model, "native", **settings), [[""] * num_rows])
    settings |= {"enable_lora": True, "max_loras": num_rows, "max_lora_rank": rank}
    engine = make_engine(model, "native", **settings)
    (adapters,) = engine.additions
    made = [make_adapter(adapters, 1 + i, rank, everywhere) for i in range(num_rows + 2)]
    for each in made[:num_rows]:
        adapters.table.add(each)
    groups = {UNUSED: [""] * num_rows}
    for num in counts:
        groups[f"{num} adapters"] = [made[row % num].digest for row in range(num_rows)]
    last = f"{num_rows} adapters, others are added"
    groups[last] = groups[f"{num_rows} adapters"]
    streams = Streams(engine, [*groups.values()])
    found: dict[str, list[float]] = {group: [] for group in (PLAIN, *groups)}
    add_s: list[float] = []
    for _ in range(args.rounds):
        found[PLAIN].append(plain.decode(range(num_rows)))
        for number, group in enumerate(groups):
            slots = range(number * num_rows, (number + 1) * num_rows)
            with adding(adapters, made[num_rows:] if group == last else []) as times_s:
                found[group].append(streams.decode(slots))
            add_s += times_s
    return report(found, add_s)


def report(found: dict[str, list[float]], add_s: list[float]) -> Any:
    return {
        "tokens/s": {name: spread(each) for name, each in found.items()},
        f"share of {PLAIN}": {
            name: spread([one / other for one, other in zip(each, found[PLAIN], strict=True)])
            for name, each in found.items()
        },
        "adding an adapter, ms": spread([1000 * each for each in add_s]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--streams", nargs="+", type=int, default=[8])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=25)
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

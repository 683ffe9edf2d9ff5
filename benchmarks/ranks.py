"""A model on two processes: cost of sums, and tokens per second of ranks and stages compared with
one process.

Two processes with a core each compute the sums of a step (two per layer and one for the embedding),
in turns in native code's shared memory and by gloo's ``all_reduce``. Each sum is checked.

Whole servers then take turns: one worker with all cores, two ranks, and two stages. A rank or stage
has a core of its own, as if each were a NUMA node. The machine is shared with the client.
"""

import argparse
import os
import secrets
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import uvloop
from torch import Tensor
from torch import distributed as dist

from benchmarks import servers
from benchmarks.checkpoints import FOLDER, SHAPES, checkpoint
from benchmarks.load import load
from benchmarks.processes import workers_of
from benchmarks.report import spread, write
from benchmarks.servers import Server
from kernels.cpu.collectives import Collectives, collectives_bytes, forget_name, open_memory
from kernels.cpu.library import find_variant, load_library
from kernels.cpu.operators import Kind, Operator
from kernels.cpu.packing import NativeLibrary
from kernels.cpu.program import Buffer, NativeProgram
from services.worker.ranks.rank_group import RankGroup

SIZE = 2
SERVERS = {
    "one worker": (),
    "2 ranks": ("--tensor-parallel-size", "2"),
    "2 stages": ("--pipeline-parallel-size", "2"),
}
PROMPT_LEN = 128
OUTPUT_LEN = 64


@dataclass(frozen=True)
class Sums:
    """The sums of a step: ``num`` sums of [rows, size] values each, ``rounds`` times each way."""

    num: int
    size: int
    rows: list[int]
    rounds: int


def measure_sums(sums: Sums) -> dict[str, Any]:
    memory = f"shoal-bench-{secrets.token_hex(8)}"
    open_memory(memory, collectives_bytes(load_library(find_variant()), SIZE), creates=True).close()
    try:
        with (
            tempfile.TemporaryDirectory() as folder,
            ProcessPoolExecutor(SIZE, get_context("spawn")) as pool,
        ):
            store = Path(folder) / "store"
            ranks = [pool.submit(add_up, rank, memory, store, sums) for rank in range(SIZE)]
            found: dict[str, Any] = next(as_completed(ranks)).result()
    finally:
        forget_name(memory)
    return found


def add_up(rank: int, memory: str, store: Path, sums: Sums) -> dict[str, Any]:
    """Runs in a process for each rank. Returns milliseconds per step, by rows and way."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    RankGroup(store, rank, SIZE, torch.device("cpu"))
    library = load_library(find_variant())
    native = NativeLibrary(library, torch.bfloat16, 1)
    collectives = Collectives(
        library, open_memory(memory, collectives_bytes(library, SIZE), creates=False), rank, SIZE
    )
    operator = Operator(kind=Kind.SUM, source=0, out=0, size=sums.size)
    program = NativeProgram(native, [operator] * sums.num, [Buffer(sums.size, torch.float32)], 1, 0)

    def by_gloo(part: Tensor) -> None:
        for _ in range(sums.num):
            dist.all_reduce(part)

    ways = {"own": lambda part: program.run([part]), "gloo": by_gloo}
    found = {}
    for num_rows in sums.rows:
        part = torch.randn(num_rows, sums.size)
        # From the second sum on both ranks have equal parts, so that each sum doubles the one
        # before.
        right = collectives.sum(part) * 2.0 ** (sums.num - 1)
        seconds: dict[str, list[float]] = defaultdict(list)
        for _ in range(sums.rounds):
            for name, run in ways.items():
                ours = part.clone()
                collectives.first(part)  # a barrier
                start = time.perf_counter()
                run(ours)
                seconds[name].append(time.perf_counter() - start)
                if not torch.equal(ours, right):
                    raise RuntimeError(f"the sums of {num_rows} rows are wrong: {name}")
        each = {name: {"ms": spread([1e3 * s for s in of])} for name, of in seconds.items()}
        ratio = each["gloo"]["ms"]["median"] / each["own"]["ms"]["median"]
        found[f"{num_rows} rows"] = {**each, "times as long by gloo": round(ratio, 2)}
    return found


async def measure_servers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second by number of streams and server."""
    rates: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(arguments.rounds):
        for name, flags in SERVERS.items():
            with tempfile.TemporaryDirectory(prefix="shoal-ranks-") as folder:
                server = server_of(arguments, Path(folder), flags)
                async with servers.running(server) as url:
                    if flags:
                        pin(workers_of(Path(folder)))
                    for num in arguments.streams:
                        rate = await tokens_per_s(arguments, url, num, seed=1000 * number + num)
                        rates[f"{num} streams"][name].append(rate)
                        print(f"round {number + 1}: {name}, {num} streams: {rate:.1f} tokens/s")
    return {
        streams: {
            name: {"tokens/s": spread(of), "to one worker": _ratio(of, by_name["one worker"])}
            for name, of in by_name.items()
        }
        for streams, by_name in rates.items()
    }


def server_of(arguments: argparse.Namespace, folder: Path, flags: tuple[str, ...]) -> Server:
    model = checkpoint(arguments.model, arguments.checkpoints)
    server = servers.shoal(model, "--no-enable-prefix-caching", *flags)
    return replace(server, environment=server.environment | {"SHOAL_MESH_DIR": str(folder)})


def pin(workers: list[int]) -> None:
    """Pins each process, with all its threads, to its own core."""
    if len(workers) != SIZE:
        raise RuntimeError(f"{len(workers)} processes compute, not {SIZE}")
    for pid, core in zip(workers, sorted(os.sched_getaffinity(0)), strict=False):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


async def tokens_per_s(arguments: argparse.Namespace, url: str, num: int, seed: int) -> float:
    figures = await load(
        url,
        concurrency=num,
        num_requests=num * arguments.waves,
        warmup=num,
        input_len=PROMPT_LEN,
        output_len=OUTPUT_LEN,
        vocab_size=SHAPES[arguments.model]["vocab_size"],
        seed=seed,
    )
    rate: float = figures["output_tokens_per_s"]
    return rate


def _ratio(ours: list[float], alone: list[float]) -> dict[str, float]:
    """Ratios round by round."""
    return spread([one / other for one, other in zip(ours, alone, strict=True)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=list(SHAPES), default="medium")
    add("--checkpoints", type=Path, default=FOLDER, metavar="DIR", help="(default: %(default)s)")
    add("--streams", nargs="+", type=int, default=[1, 8, 32], metavar="N")
    add("--rounds", type=int, default=3)
    add("--waves", type=int, default=2, help="requests a stream, one after the other")
    add("--sum-rows", nargs="+", type=int, default=[1, 8, 32, 512], metavar="N")
    add("--sum-rounds", type=int, default=50, help="steps of sums, each way")
    arguments = parser.parse_args()
    shape = SHAPES[arguments.model]
    sums = Sums(
        2 * shape["num_hidden_layers"] + 1,
        shape["hidden_size"],
        arguments.sum_rows,
        arguments.sum_rounds,
    )
    of_sums = {"a step has": sums.num, "of size": sums.size, **measure_sums(sums)}
    of_servers = uvloop.run(measure_servers(arguments))
    write("ranks", {"model": arguments.model, "sums of a step": of_sums, "servers": of_servers})


if __name__ == "__main__":
    main()

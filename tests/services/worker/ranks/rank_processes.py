"""Ranks as processes, which run several models one after another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

from benchmarks.harness.engines import make_engine
from benchmarks.harness.ports import free_port
from services.worker.backends.native import NativeLM
from shared.wire.messages import ALL_TOKENS, SamplingParams
from tests.preloaded import PRELOADED
from tests.services.worker.driver import Driver, Job, model_of
from tests.services.worker.prompts import random_prompts

TIMEOUT_S = 300
NUM_TOKENS = 8
NUM_STEPS = 3  # of a plan, if ranks take several
PARAMS = SamplingParams(seed=3, temperature=0.0, max_tokens=NUM_TOKENS, logprobs=ALL_TOKENS)
SAMPLED = SamplingParams(seed=5, temperature=0.8, top_p=0.9, max_tokens=NUM_TOKENS)

_context = get_context("forkserver")
_context.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Texts:
    """The outputs of several prompts, and the requested logprobs [V] at each token."""

    ids: list[list[int]]
    logprobs: np.ndarray  # [tokens, V]

    @staticmethod
    def of(engine: Any, num_steps: int = 1) -> "Texts":
        """Two prompts in chunks, with logprobs, and a third with sampled tokens."""
        params = [PARAMS, PARAMS, SAMPLED]
        jobs = [Job(*each) for each in zip(random_prompts(4)[1:], params, strict=True)]
        ids = Driver(engine, chunk_sizes=(5, 11), num_steps=num_steps).run(jobs)
        rows = [by_id(row) for job in jobs for row in job.logprobs if len(row) > 1]
        return Texts(ids, np.stack(rows))


def checked_texts(engine: Any, num_steps: int) -> Texts:
    """By native code the first prompt has the same results alone."""
    texts = Texts.of(engine, num_steps)
    if isinstance(model_of(engine), NativeLM):
        alone = Job(random_prompts(4)[1], PARAMS)
        Driver(engine, seed=1).run([alone])
        rows = np.stack([by_id(row) for row in alone.logprobs])
        assert rows.tobytes() == texts.logprobs[: len(rows)].tobytes()
    return texts


@dataclass(frozen=True)
class Case:
    """A model, its engine's settings, and the plans that give ``texts``."""

    folder: Path
    kernels: str = "torch"
    settings: dict[str, Any] = field(default_factory=dict)
    prepare: Callable[[int], None] | None = None  # a rank, for this case and later ones
    texts: Callable[[Any, int], Texts] = checked_texts


def by_id(row: np.ndarray) -> np.ndarray:
    """Without the token's own logprob, which comes first."""
    return row[1:]


def texts_alone(case: Case) -> Texts:
    return Texts.of(make_engine(case.folder, case.kernels, **case.settings))


@contextmanager
def texts_of_ranks(
    cases: dict[str, Case], size: int, directory: Path, num_hosts: int = 1
) -> Iterator[dict[str, list[Texts]]]:
    """Starts the ranks, and yields a list filled at the end of the block: each rank's outputs.
    Hosts are simulated on the loopback interface."""
    found: dict[str, list[Texts]] = {}
    hosts = {
        "tensor_parallel_size": size,
        "nnodes": num_hosts,
        "master_addr": "127.0.0.1",
        "insecure_tcp": True,
    }
    port = free_port(len(cases) + 1)
    processes = [
        _context.Process(
            target=_run,
            args=(cases, rank, directory, port, {**hosts, "node_rank": rank * num_hosts // size}),
            daemon=True,
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    yield found
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0, f"{process} did not end well"
    for number, name in enumerate(cases):
        found[name] = [_read(directory / f"{number}-{rank}.npz") for rank in range(size)]


def _run(
    cases: dict[str, Case], rank: int, directory: Path, port: int, hosts: dict[str, Any]
) -> None:
    """Ranks meet once per case, each time at another port, since one rank may still hold the
    previous case's."""
    torch.set_num_threads(1)
    for number, case in enumerate(cases.values()):
        if case.prepare is not None:
            case.prepare(rank)
        engine = make_engine(
            case.folder,
            case.kernels,
            **case.settings,
            **hosts,
            rank=rank,
            master_port=port + number,
            leader=str(number),
            mesh_dir=directory,
        )
        assert isinstance(model_of(engine), NativeLM) == (case.kernels == "native")
        texts = case.texts(engine, min(NUM_STEPS, engine.capacity.max_num_steps))
        arrays: dict[str, Any] = {f"{n}": np.array(ids) for n, ids in enumerate(texts.ids)}
        np.savez(directory / f"{number}-{rank}.npz", logprobs=texts.logprobs, **arrays)
        if distributed.is_initialized():
            distributed.destroy_process_group()


def _read(path: Path) -> Texts:
    with np.load(path) as arrays:
        num_texts = len(arrays) - 1
        return Texts([arrays[f"{n}"].tolist() for n in range(num_texts)], arrays["logprobs"])

"""The ranks that compute a model together, as its loading sees them."""

import ctypes
from importlib import import_module
from typing import NamedTuple, Protocol, cast

import torch

from services.worker.config.model_config import ModelConfig
from services.worker.layers.parallel import Parallel
from services.worker.machine.hardware import Memory, read_memory
from services.worker.startup.implementations import PARTS
from shared.settings.worker import WorkerConfig

NODE_BITS = 16  # of the number of a NUMA node


class Joined(NamedTuple):
    """``ranks`` are all ranks of the worker, which agree on the number of blocks; ``parallel`` is
    this rank's part of the model."""

    ranks: Parallel
    parallel: Parallel


class RanksModule(Protocol):
    """For workers with several ranks."""

    def check_split(self, settings: WorkerConfig, config: ModelConfig | None) -> None:
        """Raises ConfigError, before anything is read, if ranks cannot share the model; ``config``
        is None if transformers computes it."""

    def join_ranks(self, settings: WorkerConfig, device: torch.device) -> Joined:
        """Waits for the other ranks. Raises ConfigError."""

    def meet_natively(
        self, parallel: Parallel, settings: WorkerConfig, library: ctypes.CDLL
    ) -> Parallel:
        """``parallel`` with sums by native code. Raises ConfigError."""


def ranks_of(settings: WorkerConfig) -> RanksModule | None:
    """None for a worker of one rank."""
    return None if settings.num_ranks == 1 else cast(RanksModule, import_module(PARTS["ranks"]))


def share_of(
    memory: Memory, settings: WorkerConfig, ranks: Parallel, device: torch.device
) -> Memory:
    """A rank's part of ``memory``, which ranks on CPUs with the same NUMA node share, and, on the
    whole machine, all ranks of a host. All ranks read it before any rank begins to fill it."""
    whole = read_memory(device)
    node = 0 if settings.numa_node is None else settings.numa_node + 1
    num = ranks.num_alike(settings.node_rank << NODE_BITS | node)
    if device.type == "cuda":
        return memory
    num_ranks = len(settings.ranks_of_host)
    return Memory(
        min(memory.total // num, whole.total // num_ranks),
        min(memory.free // num, whole.free // num_ranks),
    )

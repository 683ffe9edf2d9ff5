"""Has ranks meet in memory that they share, where native code adds up."""

import ctypes
import secrets
from dataclasses import replace

import torch

from kernels.cpu.meeting import Meeting, forget_name, meeting_bytes, open_memory
from services.worker.layers.parallel import Parallel
from services.worker.startup.connect_hosts import connect_hosts
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig


def meet_natively(parallel: Parallel, settings: WorkerConfig, library: ctypes.CDLL) -> Parallel:
    """The ranks of a host share memory, and its first one has what the other hosts add. Raises
    ConfigError where there is too little memory."""
    if parallel.size == 1:
        return parallel
    rank, size, of_host = parallel.rank, parallel.size, settings.ranks_of_host
    is_first = rank == of_host.start
    token = parallel.first(torch.tensor([secrets.randbits(62)]))
    name = f"shoal-{int(token):x}-{settings.node_rank}"
    num_bytes = meeting_bytes(library, size)
    try:
        if is_first:
            memory = open_memory(name, num_bytes, creates=True)
        parallel.least(0)  # it is there
        if not is_first:
            memory = open_memory(name, num_bytes, creates=False)
        parallel.least(0)  # all have opened it
    except OSError as error:
        raise ConfigError(
            f"tensor-parallel-size: {len(of_host)} ranks share {num_bytes >> 20} MiB of /dev/shm:"
            f" {error.strerror}"
        ) from None
    finally:
        if is_first:
            forget_name(name)
    others = connect_hosts(parallel, settings)
    return replace(parallel, group=Meeting(library, memory, rank, size, of_host, others))

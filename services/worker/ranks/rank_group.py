"""Where the ranks of a worker meet: torch's process groups, gloo's on CPUs and NCCL's on GPUs."""

import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d as c10d

from services.worker.layers.stage import Sent
from services.worker.ranks.connect_hosts import address_of_first, address_towards
from shared.errors import ConfigError

LOOPBACK = "lo"
TIMEOUT = timedelta(
    hours=1
)  # a lost rank ends the others long before, see ``services/worker/ranks``


class RankGroup:
    """Ranks of one host, which find each other through a file, ``store``.

    On CPUs parts are gathered, and added in the order of ranks in float32: each number's bits
    depend on the parts alone, not on the rest of the step or on timing. NCCL adds in an order of
    its own.
    """

    def __init__(self, store: Path, rank: int, size: int, device: torch.device) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        self._size = size
        backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend,
            store=dist.FileStore(str(store), size),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=TIMEOUT,
            device_id=None if device.type == "cpu" else device,
        )

    def sum(self, part: Tensor) -> Tensor:
        if part.is_cuda:
            total = part.clone()
            dist.all_reduce(total)
            return total
        return _in_order(self.gather(part))

    def gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty(self._size, *part.shape)
        if not part.numel():
            return parts
        dist.all_gather(list(parts.unbind(0)), part.contiguous())
        return parts

    def first(self, own: Tensor) -> Tensor:
        of_first = own.clone()
        if not own.numel():
            return of_first
        dist.broadcast(of_first, 0)
        return of_first

    def send(self, tensor: Tensor, stage: int, kind: int) -> Sent:
        sent = dist.isend(tensor, stage, tag=kind)
        assert sent is not None  # we are of the group
        return sent

    def receive(self, into: Tensor, stage: int, kind: int) -> None:
        dist.recv(into, stage, tag=kind)


class HostsGroup:
    """Ranks of several hosts, on CPUs, which send over the addresses between the first host,
    ``first``, and the others.

    They find each other through a store of the first rank at ``port`` there; ``name`` distinguishes
    them from ranks that met there before.
    """

    def __init__(self, first: str, port: int, name: str, rank: int, size: int) -> None:
        self._size = size
        self._store = _store_of_hosts(first, port, is_first=rank == 0)
        gloo: Any = c10d.ProcessGroupGloo  # its stub lacks some attributes
        options = gloo._Options()
        options._timeout = TIMEOUT
        options._devices = [gloo.create_device(hostname=address_towards(first))]
        self._group = gloo(c10d.PrefixStore(name, self._store), rank, size, options)

    def sum(self, part: Tensor) -> Tensor:
        return _in_order(self.gather(part))

    def gather(self, part: Tensor) -> Tensor:
        parts = part.new_empty(self._size, *part.shape)
        if part.numel():
            self._group.allgather([list(parts.unbind(0))], [part.contiguous()]).wait()
        return parts

    def first(self, own: Tensor) -> Tensor:
        of_first = own.clone()
        if own.numel():
            self._group.broadcast([of_first], c10d.BroadcastOptions()).wait()
        return of_first

    def send(self, tensor: Tensor, stage: int, kind: int) -> Sent:
        sent: Sent = self._group.send([tensor], stage, kind)
        return sent

    def receive(self, into: Tensor, stage: int, kind: int) -> None:
        self._group.recv([into], stage, kind).wait()


def _store_of_hosts(first: str, port: int, *, is_first: bool) -> c10d.TCPStore:
    """The first rank serves it, at its own address alone. Raises ConfigError if it cannot."""
    if not is_first:
        return c10d.TCPStore(first, port, timeout=TIMEOUT)
    address = address_of_first(first)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listening = socket.create_server((address, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"master-port: {port}, the next one, is where ranks meet first:"
            f" {error.strerror} at {address}"
        ) from None
    return c10d.TCPStore(
        address,
        listening.getsockname()[1],
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


def _in_order(parts: Tensor) -> Tensor:
    """parts [size, …] → their sum, in the order of ranks and in float32"""
    total = torch.zeros_like(parts[0], dtype=torch.float32)
    for each in parts:
        total += each
    return total.to(parts.dtype)

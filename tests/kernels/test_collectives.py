"""Processes that sum their parts in shared memory."""

import ctypes
import os
import socket
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kernels.cpu.collectives import Collectives, collectives_bytes, forget_name, open_memory
from kernels.cpu.library import find_variant, load_library

SIZES = (0, 1, 37, 70_000, 600_000)  # the last takes several exchanges
ROUNDS = 3


def library() -> ctypes.CDLL:
    variant = find_variant()
    if variant is None:
        pytest.skip("no native code was built")
    return load_library(variant)


def part_of(rank: int, size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank * 1000 + size))


def take_part(name: str, rank: int, size: int, folder: Path) -> None:
    native = library()
    native["shoal_start"](2)
    memory = open_memory(name, collectives_bytes(native, size), creates=False)
    collectives = Collectives(native, memory, rank, size)
    found = [collectives.sum(part_of(rank, each)) for _ in range(ROUNDS) for each in SIZES]
    odd = collectives.first(torch.full((3,), rank, dtype=torch.bfloat16))
    np.savez(folder / f"{rank}.npz", *[each.numpy() for each in found], odd=odd.float().numpy())


def join_as_host(name: str, rank: int, size: int, folder: Path, wires: dict[int, Any]) -> None:
    """Two ranks share a host's memory; ``wires`` are its first rank's."""
    native = library()
    native["shoal_start"](1)
    memory = open_memory(name, collectives_bytes(native, size), creates=False)
    of_host = range(rank // 2 * 2, rank // 2 * 2 + 2)
    collectives = Collectives(native, memory, rank, size, of_host, wires)
    found = [collectives.sum(part_of(rank, each)) for _ in range(ROUNDS) for each in SIZES]
    np.savez(folder / f"{rank}.npz", *[each.numpy() for each in found])
    if rank == 0:
        with pytest.raises(ConnectionError, match="another host's ranks"):
            collectives.gather(torch.zeros(4))
    if rank == 1:
        collectives.gather(torch.zeros(4))  # another host has left: this blocks until the kill


def test_ranks_of_three_hosts_have_the_sum_in_the_order_of_ranks(tmp_path: Path) -> None:
    size, num_hosts = 6, 3
    num_bytes = collectives_bytes(library(), size)
    names = [f"shoal-test-{os.getpid()}-{host}" for host in range(num_hosts)]
    wires: list[dict[int, socket.socket]] = [{} for _ in range(num_hosts)]
    for host in range(num_hosts):
        open_memory(names[host], num_bytes, creates=True)
        for other in range(host):
            wires[host][other], wires[other][host] = socket.socketpair()
    context = get_context("forkserver")
    processes = [
        context.Process(
            target=join_as_host,
            args=(names[rank // 2], rank, size, tmp_path, {} if rank % 2 else wires[rank // 2]),
            daemon=True,
        )
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for ours in wires:
            for wire in ours.values():
                wire.close()
        for rank, process in enumerate(processes):
            if rank != 1:
                process.join(60)
                assert process.exitcode == 0
        processes[1].kill()
    finally:
        for name in names:
            forget_name(name)
    assert_sums(tmp_path, size)


def assert_sums(folder: Path, size: int) -> None:
    for rank in range(size):
        with np.load(folder / f"{rank}.npz") as found:
            for number, each in enumerate(SIZES * ROUNDS):
                expected = part_of(0, each)
                for other in range(1, size):
                    expected = expected + part_of(other, each)
                assert found[f"arr_{number}"].tobytes() == expected.numpy().tobytes()


def test_all_have_the_sum_in_the_order_of_ranks(tmp_path: Path) -> None:
    size = 3
    name, num_bytes = f"shoal-test-{os.getpid()}", collectives_bytes(library(), size)
    open_memory(name, num_bytes, creates=True)
    context = get_context("forkserver")
    processes = [
        context.Process(target=take_part, args=(name, rank, size, tmp_path), daemon=True)
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            assert process.exitcode == 0
    finally:
        forget_name(name)
    assert_sums(tmp_path, size)
    for rank in range(size):
        with np.load(tmp_path / f"{rank}.npz") as found:
            assert found["odd"].tolist() == [0.0, 0.0, 0.0]

"""Every worker of a machine claims its own GPU. The tests need no GPU."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from services.worker.machine import hardware
from services.worker.machine.gpu_claim import GpuClaim, claim_gpu
from services.worker.machine.hardware import choose_device
from shared.errors import ConfigError

CLAIM = """
import sys
from pathlib import Path
from services.worker.machine.gpu_claim import claim_gpu
from shared.errors import ConfigError
try:
    print(claim_gpu(Path(sys.argv[1]), sys.argv[2:]).index, flush=True)
except ConfigError as error:
    print(error, flush=True)
assert "torch" not in sys.modules
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process that claims one of the GPUs, prints its index, and holds it until it
    ends."""
    started: list[subprocess.Popen[str]] = []

    def start(*gpu_ids: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CLAIM, str(tmp_path / "gpus"), *gpu_ids]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().rstrip()


def test_each_process_takes_the_first_gpu_that_is_free(start: Start, tmp_path: Path) -> None:
    assert [answer(start("a", "b")) for _ in range(3)] == [
        *("0", "1"),
        f"gpu-claims: all 2 GPUs are taken by other workers (folder {tmp_path / 'gpus'})",
    ]


def test_the_gpu_of_a_killed_process_goes_to_the_next(start: Start) -> None:
    first = start("a", "b")
    assert answer(first) == "0"
    second = start("a", "b")
    assert answer(second) == "1"
    first.kill()
    first.wait()
    assert answer(start("a", "b")) == "0"
    assert second.poll() is None


def test_processes_that_start_together_take_different_gpus(start: Start) -> None:
    processes = [start(*"abcd") for _ in range(4)]
    assert sorted(map(answer, processes)) == list("0123")


def test_a_gpu_is_known_by_its_id_and_not_by_its_index(start: Start) -> None:
    assert answer(start("a", "b")) == "0"
    assert answer(start("b", "a")) == "0"
    assert "are taken" in answer(start("b", "a"))


def test_a_folder_that_cannot_be_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"gpu-claims: {tmp_path}/file: "):
        claim_gpu(tmp_path / "file", ["a"])


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.device]]:
    """A fake torch with two GPUs; records the devices made current. Claims end with the test."""
    current: list[torch.device] = []
    claims: list[GpuClaim] = []
    gpus = [SimpleNamespace(uuid="a"), SimpleNamespace()]

    def claim(*args: Any) -> GpuClaim:
        claims.append(claim_gpu(*args))
        return claims[-1]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(hardware, "claim_gpu", claim)
    yield current
    for each in claims:
        os.close(each.lock)


def test_a_worker_computes_on_the_gpu_that_it_claimed(
    tmp_path: Path, current: list[torch.device]
) -> None:
    expected = [torch.device("cuda:0"), torch.device("cuda:1")]
    assert [choose_device("auto", tmp_path), choose_device("cuda", tmp_path)] == expected
    assert current == expected
    assert {path.name for path in tmp_path.iterdir()} == {"a.lock", "1.lock"}
    with pytest.raises(ConfigError, match="all 2 GPUs are taken"):
        choose_device("auto", tmp_path)


def test_without_a_folder_it_is_torchs_current_gpu_by_its_number(
    monkeypatch: pytest.MonkeyPatch, current: list[torch.device]
) -> None:
    """Other threads select it too, which torch refuses without an index."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert [choose_device("auto", None), choose_device("cuda", None)] == [
        torch.device("cuda:1")
    ] * 2
    assert not current


def test_a_worker_on_a_cpu_claims_nothing(tmp_path: Path, monkeypatch, current) -> None:
    assert choose_device("cpu", tmp_path / "gpus") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", tmp_path / "gpus") == torch.device("cpu")
    assert not list(tmp_path.iterdir())

"""Findings from invented facts, and one run on this machine."""

import errno
import json
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.doctor import command, facts
from cli.doctor.facts import Devices, Facts, Gpu
from cli.doctor.findings import CHECKS, findings
from cli.exit_codes import FAILED, OK, WRONG
from shared.model_folder import EMBEDDED_MODEL, weight_files
from shared.settings.serve import ServeConfig

GIB = 1 << 30
WEIGHTS = weight_files(EMBEDDED_MODEL)[0].name
CPU = {
    "model": "Fish 9000",
    "cores": 8,
    "usable_cores": 8,
    "numa_nodes": 1,
    "flags": ["avx2", "avx512f"],
}
ENVIRONMENT: dict[str, Any] = {
    "shoal": "0.1.0",
    "python": "3.11.7",
    "system": "Linux 6.1 x86_64",
    "cpu": CPU,
    "native_code": {"chosen": "avx512", "cpu_can_run": ["avx512", "avx2"]},
    "memory_mib": {"total": 16_000, "available": 8_000},
}
DEVICES = Devices(torch="2.12", cuda=None, dtype="bfloat16", free_bytes=8 * GIB)
GOOD = Facts(
    environment=ENVIRONMENT,
    devices=DEVICES,
    num_gpu_files=0,
    shared_memory_bytes=GIB,
    huge_pages="madvise",
    max_open_files=65_536,
    weights_bytes=GIB,
    engine="27.1.0",
    compose="2.29.1",
)
OLD = Gpu("Old Card", (7, 5), 8 * GIB)
NEW = Gpu("New Card", (9, 0), 80 * GIB)


def environment(**changes: Any) -> dict[str, Any]:
    return {"environment": ENVIRONMENT | changes}


def cpu(**changes: Any) -> dict[str, Any]:
    return environment(cpu=CPU | changes)


def devices(**changes: Any) -> dict[str, Any]:
    return {"devices": replace(DEVICES, **changes)}


def config(**settings: Any) -> dict[str, Any]:
    return {"config": ServeConfig(**settings)}


def native(chosen: str | None, *possible: str) -> dict[str, Any]:
    return environment(native_code={"chosen": chosen, "cpu_can_run": [*possible]})


def test_a_good_machine_has_nothing_to_change():
    found = findings(GOOD)
    assert len(found) == len(CHECKS)
    assert {each.state for each in found} == {"ok"}


@pytest.mark.parametrize(
    ("changes", "topic", "text", "fix"),
    [
        (native(None, "amx"), "processor", "can run native code for amx, built is none", "g++"),
        (native("avx2", "avx512", "avx2"), "processor", "built is only avx2", "make setup"),
        (native(None), "processor", "needs AVX2", ""),
        (cpu(flags=["amx_tile"]), "processor", "the kernel refuses AMX", "Linux 5.16"),
        (cpu(usable_cores=1), "cores", "1 of 8 usable", "CPU quota"),
        (cpu(numa_nodes=2), "cores", "on 2 NUMA nodes: one worker waits", "--workers auto"),
        ({"huge_pages": "never"}, "huge pages", "never", "echo madvise"),
        ({"max_open_files": 1024}, "open files", "max-open-requests = 4,096 needs", "ulimit"),
        ({"num_gpu_files": 2}, "GPUs", "the driver has 2, torch finds none", "with CUDA"),
        ({"engine": "19.3"}, "docker", "engine 19.3", "20.10"),
        ({"compose": ""}, "docker", "compose not installed", "2.26"),
    ],
)
def test_a_machine_that_could_do_better_is_noted(
    changes: dict[str, Any], topic: str, text: str, fix: str
):
    check_one(changes, topic, "note", text, fix)


@pytest.mark.parametrize(
    ("changes", "topic", "text", "fix"),
    [
        (environment(system="Darwin 23"), "software", "needs Linux", "virtual machine"),
        ({"missing_packages": ("torch",)}, "packages", "torch", "pip install '.["),
        ({"port_error": "host, port: cannot; try --port 9"}, "port", "cannot", "--port 9"),
        ({"port_error": "host, port: cannot"}, "port", "cannot", "--host 127.0.0.1"),
        ({"mesh_dir_error": "mesh-dir: no"}, "mesh-dir", "no", "--mesh-dir /tmp"),
        (devices(gpus=(OLD,)), "GPUs", "Old Card (7.5): compute capability 8.0", "--device cpu"),
        (config(device="cuda"), "GPUs", "torch finds none", "--device cpu"),
        ({"model_error": "model: no such folder: x"}, "model", "no such", "--model FOLDER"),
        ({"weights_bytes": 9 * GIB}, "model", "9,216 MiB of weights, 8,192 MiB", "wint4"),
        (
            config(tensor_parallel_size=2) | {"shared_memory_bytes": GIB >> 10},
            "shared memory",
            "2 ranks need 4 MiB",
            "--shm-size 4m",
        ),
    ],
)
def test_a_machine_without_a_start_has_a_problem(
    changes: dict[str, Any], topic: str, text: str, fix: str
):
    check_one(changes, topic, "problem", text, fix)


def check_one(changes: dict[str, Any], topic: str, state: str, text: str, fix: str) -> None:
    [found] = [each for each in findings(replace(GOOD, **changes)) if each.state != "ok"]
    assert (found.topic, found.state) == (topic, state)
    assert text in found.text
    assert fix in found.fix


@pytest.mark.parametrize(
    "changes",
    [
        devices(gpus=(NEW,), cuda="13.0") | native(None),
        devices(gpus=(OLD,)) | config(device="cpu"),
        {"weights_bytes": 9 * GIB} | config(quantization="wint4"),
        {"weights_bytes": 9 * GIB} | devices(gpus=(NEW,)),
        {"engine": "", "compose": ""},
        {"shared_memory_bytes": None},
        {"max_open_files": -1},
        cpu(numa_nodes=2) | config(workers="auto"),
    ],
)
def test_the_rest_is_as_it_should_be(changes: dict[str, Any]):
    assert {each.state for each in findings(replace(GOOD, **changes))} == {"ok"}


def test_a_running_server_may_have_the_port():
    found = findings(replace(GOOD, port_error="host, port: cannot", serves_already=True))
    assert [each.text for each in found if each.topic == "port"] == [
        "127.0.0.1:8000 is that of a running server"
    ]


def test_a_socket_needs_no_port():
    found = findings(replace(GOOD, **config(uds="/run/fish.sock")))
    assert [each.text for each in found if each.topic == "port"] == [
        "none; the socket is /run/fish.sock"
    ]


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        (
            "config.json",
            b'{"architectures": [',
            "config.json is not JSON: Input data was truncated",
        ),
        ("tokenizer.json", None, "has no file tokenizer.json"),
        (WEIGHTS, b"\x08", f"{WEIGHTS} is not a valid safetensors file"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_a_problem(
    tmp_path: Path, file: str, content: bytes | None, text: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    assert facts._model(ServeConfig(model=str(folder)))[0] == ""
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    assert text in facts._model(ServeConfig(model=str(folder)))[0]


def test_more_positions_than_the_model_has_are_a_problem() -> None:
    assert "max-model-len: 9999" in facts._model(ServeConfig(max_model_len=9999))[0]


def test_without_torch_there_is_one_problem():
    found = findings(replace(GOOD, devices=Devices(error="ImportError: no libc10")))
    assert [each.topic for each in found if each.state == "problem"] == ["packages"]


def test_this_machine_is_checked_with_the_settings(tmp_path: Path, capsys):
    tmp_path.chmod(0o755)
    assert command.main(["--json", "--mesh-dir", str(tmp_path), "--port", "0"]) == FAILED
    found = {each["topic"]: each for each in json.loads(capsys.readouterr().out)}
    assert {name for name, each in found.items() if each["state"] == "problem"} == {"mesh-dir"}
    assert "only we can enter" in found["mesh-dir"]["text"]
    assert "MiB of weights" in found["model"]["text"]
    assert command.main(["--fish"]) == WRONG


def test_a_mesh_dir_without_room_has_the_reason(tmp_path: Path, monkeypatch):
    tmp_path.chmod(0o700)
    assert not facts._error_of(facts._check_mesh_dir, ServeConfig(mesh_dir=tmp_path))
    assert not [*tmp_path.iterdir()]

    def full(**_: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    text = facts._error_of(facts._check_mesh_dir, ServeConfig(mesh_dir=tmp_path))
    assert text == f"mesh-dir: {tmp_path}: No space left on device"


def test_people_get_a_line_for_each_finding_and_its_fix(monkeypatch, capsys):
    monkeypatch.setattr(command, "gather", lambda config: replace(GOOD, huge_pages="never"))
    assert command.main([]) == OK
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CHECKS) + 1
    assert "→ echo madvise" in lines[7]

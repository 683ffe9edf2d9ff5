"""The end of a program, however it comes, is the end of its mesh."""

import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.processes import services_of
from shoal import LLM

ROOT = Path(__file__).parents[2]
SCRIPT = """
import select
import signal
import sys
from shoal import LLM, SamplingParams

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
llm = LLM("shoal-tiny", mesh_dir=sys.argv[1], num_threads=1, schedulers=1)
endless = SamplingParams(max_tokens=None, ignore_eos=True)
print(llm.generate("import", SamplingParams(max_tokens=1))[0].finished, flush=True)
if sys.argv[2] == "error":
    raise LookupError("a mistake of the script")
while True:
    llm.generate(["import os"] * 300, endless)
"""

FORKING = """
import os
import sys
from shoal import LLM, SamplingParams

llm = LLM("shoal-tiny", mesh_dir=sys.argv[1], num_threads=1, schedulers=1)
if (fork := os.fork()) == 0:
    llm.close()
    os._exit(0)
os.waitpid(fork, 0)
print(llm.generate("import", SamplingParams(max_tokens=1))[0].finished, flush=True)
if (fork := os.fork()) > 0:
    print(fork, flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("error", 1),
        ("SIGINT", -signal.SIGINT),
        ("SIGKILL", -signal.SIGKILL),
    ],
)
def test_no_process_survives_a_script(tmp_path: Path, end: str, code: int):
    script, mesh = tmp_path / "script.py", tmp_path / "mesh"
    script.write_text(SCRIPT)
    process = subprocess.Popen(
        [sys.executable, str(script), str(mesh), end],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "True\n"
    if end != "error":
        assert len(services_of(mesh)) == 4
        process.send_signal(signal.Signals[end])
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors.count("Traceback") == (end != "SIGKILL"), errors
    wait_for_end(mesh)
    if end != "SIGKILL":
        assert not [*mesh.iterdir()]


@pytest.mark.slow
def test_a_fork_neither_ends_a_mesh_nor_keeps_it_after_its_owner(tmp_path: Path):
    script, mesh = tmp_path / "script.py", tmp_path / "mesh"
    script.write_text(FORKING)
    with subprocess.Popen(
        [sys.executable, str(script), str(mesh)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        fork = int(process.stdout.readline())
        process.kill()
        process.wait()
        wait_for_end(mesh)
        assert Path(f"/proc/{fork}").exists()


def wait_for_end(mesh: Path) -> None:
    for pid in services_of(mesh).values():
        with suppress(ProcessLookupError):
            ended = os.pidfd_open(pid)
            assert select.select([ended], [], [], 30)[0], pid
            os.close(ended)
    assert not services_of(mesh)


def test_a_model_that_does_not_exist_ends_the_start(tmp_path: Path):
    with pytest.raises(ValueError, match=r"model: .*: /nowhere@main"):
        LLM("/nowhere", revision="main", mesh_dir=tmp_path)
    assert not services_of(tmp_path)
    assert not [*tmp_path.iterdir()]

"""The GPU check on a machine like those with a GPU: torch, another Triton, and no other libraries
than the carried ones."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.carry import ROOT, pack

IMAGE = (
    *("torch>=2.11,<=2.13.0", "triton==3.6.0", "numpy", "transformers>=5,<6", "tokenizers"),
    *("safetensors", "huggingface-hub", "aiohttp", "uvloop", "rich", "prometheus-client"),
    *("pytest", "pytest-timeout", "hypothesis"),
)
OUR_LIBRARIES = ("pydantic", "pydantic-core", "pydantic-settings", "msgspec", "orjson", "pyzmq")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_check_runs_where_nothing_of_ours_is_installed(tmp_path: Path) -> None:
    """Uses the tests' own Python: torch may have no build for others."""
    venv.create(tmp_path / "image", with_pip=True)
    python = tmp_path / "image" / "bin" / "python"
    for words in (["install", "--quiet", *IMAGE], ["uninstall", "--quiet", "-y", *OUR_LIBRARIES]):
        subprocess.run([python, "-m", "pip", "--disable-pip-version-check", *words], check=True)
    tree = copied_tree(tmp_path / "tree")
    pack(f"{sys.version_info.major}.{sys.version_info.minor}", tree / ".gpu")
    module = "benchmarks.gpu.carry"
    command: list[Any] = [python, "-m", module, "run", "--dry", "--results", tmp_path]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    payload = json.loads(next(tmp_path.glob("gpu-cpu-*.json")).read_text())
    assert payload["versions"]["triton"] == "3.6.0"
    launches = {row["what"]: row for row in payload["results"]["launches"]["rows"]}
    assert {"engine, model", "engine, mtp", "kernels"} <= set(launches)
    assert all(row["launches"] > 0 for row in launches.values())
    assert launches["engine, model"]["compiled"] > 20


def copied_tree(folder: Path) -> Path:
    """Files known to git, without build outputs."""
    folder.mkdir()
    names = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    ).stdout
    command = ["tar", "--create", "--null", "--files-from=-"]
    packed = subprocess.run(command, cwd=ROOT, input=names, capture_output=True, check=True)
    subprocess.run(["tar", "--extract"], cwd=folder, input=packed.stdout, check=True)
    return folder

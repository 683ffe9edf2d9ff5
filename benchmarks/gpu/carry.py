"""Runs the GPU check on a machine with a GPU and PyTorch, but without network access and with some
libraries missing.

python3 -m benchmarks.gpu.carry pack           here: puts missing libraries into .gpu/

python3 -m benchmarks.gpu.carry run [...]      there: `python3 -m benchmarks.gpu.check ...`

Needs only Python's standard library and pip.
"""

import argparse
import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / ".gpu"
# Dependencies missing in an image with PyTorch and transformers, with the module imported from
# each.
LACKING = {
    "cryptography": "cryptography",
    "llguidance": "llguidance",
    "msgspec": "msgspec",
    "orjson": "orjson",
    "pydantic-settings": "pydantic_settings",
    "pytest-asyncio": "pytest_asyncio",
    "pytest-timeout": "pytest_timeout",
    "pyzmq": "zmq",
}
PLATFORMS = ("2_17", "2_24", "2_27", "2_28", "2_31", "2_34")  # manylinux versions


def pack(python: str, folder: Path = FOLDER) -> None:
    """Downloads wheels for ``python``, such as 3.12, with all their dependencies. Raises
    subprocess.CalledProcessError after pip printed the reason."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    platforms = [f"--platform=manylinux_{number}_x86_64" for number in PLATFORMS]
    which = ["--only-binary=:all:", f"--python-version={python}", "--implementation=cp"]
    _pip("download", "--dest", str(folder), *which, *platforms, *_requirements())


def run(arguments: list[str], folder: Path = FOLDER) -> None:
    """Replaces this process by the check, with missing libraries from the wheels of ``pack``."""
    wheels = sorted(map(str, folder.glob("*.whl")))
    site = folder / "site"
    if wheels and not all(map(find_spec, LACKING.values())):
        how = ["--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
        _pip("install", "--quiet", *how, *wheels)
    paths = [str(site), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "benchmarks.gpu.check", *arguments]
    os.chdir(ROOT)
    os.execve(sys.executable, command, environment)


def _requirements() -> list[str]:
    """``LACKING`` with the versions in pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = (each for group in project["optional-dependencies"].values() for each in group)
    by_name = {_name_of(each): each for each in (*project["dependencies"], *extras)}
    return [by_name[name] for name in LACKING]


def _name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _pip(*words: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    subprocess.run(command, check=True)


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        "python3 -m benchmarks.gpu.carry",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="download the wheels")
    packing.add_argument("--python", default="3.12", help="that machine's (default: %(default)s)")
    verbs.add_parser("run", help="run the check, whose arguments follow", add_help=False)
    options, others = parser.parse_known_args(arguments)
    if options.verb == "run":
        run(others)
    if others:
        parser.error(f"unknown: {' '.join(others)}")
    pack(options.python)


if __name__ == "__main__":
    main(sys.argv[1:])

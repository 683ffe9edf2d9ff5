"""Wings: optional parts that can be deleted, with their tests and their lines in the lists.

A wing is a folder, or one in each of several services. It imports the core, never another wing; the
core imports no wing but in the lists. Without its folders, tests and lines everything else still
works.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.test_imports import ROOT, SOURCES, imports_of

GATEWAY = "services/gateway"
WORKER = "services/worker"
SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
LISTS = (
    "cli/commands.py",
    f"{GATEWAY}/app.py",
    "services/tokenizer/service.py",
    "services/scheduler/service.py",
    f"{WORKER}/service.py",
    f"{WORKER}/startup/implementations.py",
)
# Tests of several wings at once.
TOGETHER = (
    f"tests/{GATEWAY}/apis/together",
    "tests/services/agreement",
    "tests/exactness",
    "tests/hostile",
    "tests/mesh/test_agents.py",
    "tests/sim",
)
CORE_LINES = 47_200  # of services/ and shared/; 15,000 are the aim


class Wing(NamedTuple):
    """The first of its ``folders`` has the README."""

    folders: tuple[str, ...]
    tests: tuple[str, ...]


def api(name: str, *more_tests: str) -> Wing:
    return Wing((f"{GATEWAY}/apis/{name}",), (f"tests/{GATEWAY}/apis/{name}", *more_tests))


WINGS = {
    "responses": api("responses", "tests/mesh/test_responses.py"),
    "messages": api("messages", "tests/mesh/test_messages.py"),
    "pooling": api("pooling"),
    "invocations": api("invocations"),
    "batches": Wing(
        (f"{GATEWAY}/apis/batches", "shared/batch", "cli/batch"),
        (f"tests/{GATEWAY}/apis/batches", "tests/shared/batch", "tests/cli/batch"),
    ),
    "guides": Wing(
        ("services/tokenizer/guides",),
        (
            "tests/services/tokenizer/guides",
            "tests/mesh/test_structured_text.py",
            "tests/mesh/test_tool_formats.py",
            "tests/mesh/test_tools.py",
        ),
    ),
    "text": Wing((f"{GATEWAY}/text",), (f"tests/{GATEWAY}/text",)),
    "foreign": Wing(
        (f"{WORKER}/foreign",),
        (
            f"tests/{WORKER}/foreign",
            "tests/cli/test_transformers_models.py",
            "tests/gpu/test_transformers_on_cuda.py",
        ),
    ),
    "offline": Wing(("shoal",), ("tests/offline",)),
    "adapters": Wing(
        (
            f"{WORKER}/adapters",
            "shared/adapters",
            f"{GATEWAY}/apis/adapters",
            "services/tokenizer/adapters",
            "services/scheduler/adapters",
        ),
        (
            "tests/shared/adapters",
            f"tests/{GATEWAY}/apis/adapters",
            "tests/services/tokenizer/adapters",
            "tests/services/scheduler/adapters",
            f"tests/{WORKER}/adapters",
            "tests/mesh/test_adapters.py",
            "benchmarks/adapters.py",
        ),
    ),
    "media": Wing(
        (
            f"{WORKER}/media",
            "shared/media",
            f"{GATEWAY}/media",
            "services/tokenizer/media",
            "services/scheduler/media",
        ),
        (
            f"tests/{GATEWAY}/media",
            "tests/services/tokenizer/media",
            "tests/services/scheduler/media",
            f"tests/{WORKER}/media",
            "tests/gpu/test_images_on_cuda.py",
            "tests/mesh/held_worker.py",
            "tests/mesh/test_images.py",
            "tests/mesh/test_odd_images.py",
        ),
    ),
    "stores": Wing(
        (f"{WORKER}/stores", "services/scheduler/stores"),
        (
            f"tests/{WORKER}/stores",
            "tests/services/scheduler/stores",
            "tests/mesh/test_stores.py",
            "benchmarks/stores.py",
        ),
    ),
    "page": Wing((f"{GATEWAY}/page",), (f"tests/{GATEWAY}/page", "tests/page")),
    "traces": Wing(
        (*(f"services/{service}/traces" for service in SERVICES), "cli/trace"),
        (
            *(f"tests/services/{service}/traces" for service in SERVICES),
            "tests/cli/trace",
            "tests/cli/test_later_priorities.py",
            "tests/mesh/test_traces.py",
            "tests/mesh/test_otlp.py",
        ),
    ),
}
wings = pytest.mark.parametrize("wing", WINGS.values(), ids=WINGS)


@wings
def test_a_wing_says_what_it_is(wing: Wing) -> None:
    lines = (ROOT / wing.folders[0] / "README.md").read_text().splitlines()
    assert len(lines) <= 40
    assert all((ROOT / path).exists() for path in wing.tests)


def test_the_core_imports_no_wing_and_no_wing_another() -> None:
    found = [
        f"{place} imports {name}"
        for path in SOURCES
        for place in [str(path.relative_to(ROOT))]
        for name in imports_of(path)
        if place not in LISTS and wing_of(name.replace(".", "/")) not in (None, wing_of(place))
    ]
    assert not found, "\n".join(found)


def test_only_tests_of_a_wing_import_it() -> None:
    found = [
        f"{place} imports {name}"
        for path in ROOT.glob("tests/**/*.py")
        for place in [str(path.relative_to(ROOT))]
        for name in imports_of(path)
        for wing in WINGS.values()
        if name.replace(".", "/").startswith((*map(stem_of, (*wing.folders, *wing.tests)),))
        and not place.startswith((*wing.tests, *TOGETHER))
    ]
    assert not found, "\n".join(found)


def stem_of(test: str) -> str:
    return f"{test.removesuffix('.py')}/"


def wing_of(path: str) -> str | None:
    parents = [str(each) for each in Path(path).parents]
    return next((name for name, wing in WINGS.items() if {*wing.folders} & {*parents}), None)


def test_the_core_stays_small() -> None:
    folders = ("services/", "shared/")
    places = [str(path.relative_to(ROOT)) for path in SOURCES]
    core = [each for each in places if each.startswith(folders) and wing_of(each) is None]
    assert sum(len((ROOT / each).read_text().splitlines()) for each in core) <= CORE_LINES


@wings
def test_without_a_wing_the_others_start(wing: Wing, tmp_path: Path) -> None:
    cut(wing, tmp_path)
    modules = [f"{each.replace('/', '.')}.service" for each in services_of(wing)]
    run(tmp_path, "-c", "\n".join(f"import {each}" for each in modules))


@wings
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_without_a_wing_checks_and_tests_of_the_others_pass(wing: Wing, tmp_path: Path) -> None:
    cut(wing, tmp_path)
    run(tmp_path, "-m", "mypy", "--cache-dir", str(tmp_path / ".mypy_cache"))
    folders = [f"tests/{service}" for service in services_of(wing)]
    kinds = "not slow and not seconds and not compose and not gpu"
    run(tmp_path, "-m", "pytest", "-q", "-m", kinds, *folders, "tests/test_imports.py")


def services_of(wing: Wing) -> list[str]:
    folders = [folder.split("/") for folder in wing.folders]
    return ["/".join(parts[:2]) for parts in folders if parts[0] == "services"]


def run(folder: Path, *arguments: str) -> str:
    """The output of Python in ``folder``, with that folder's modules."""
    command, environment = [sys.executable, *arguments], os.environ | {"PYTHONPATH": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def cut(wing: Wing, copy: Path) -> None:
    """Makes a ``copy`` of the tree without the wing, its tests and its lines in the lists."""
    for path in ROOT.glob("[!.]*"):
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy)
    for place in (*wing.folders, *wing.tests, *TOGETHER):
        path = copy / place
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    project = copy / "pyproject.toml"
    for folder in wing.folders:
        project.write_text(project.read_text().replace(f', "{folder}"', ""))
    for place in LISTS:
        (copy / place).write_text("".join(lines_without(wing, (copy / place).read_text())))


def lines_without(wing: Wing, text: str) -> Iterator[str]:
    modules = [f"{folder}.".replace("/", ".") for folder in wing.folders]
    either = "|".join(map(re.escape, modules))
    names = re.findall(rf"^from (?:{either})\w+ import (\w+)$", text, re.MULTILINE)
    for line in text.splitlines(keepends=True):
        if not re.search(either, line) and line.strip() not in {f"{name}," for name in names}:
            yield line

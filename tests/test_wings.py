"""Wings: optional parts that can be deleted, with their tests and their lines in the lists.

A wing is a folder, or one in each of several services. It imports the core, and of other wings only
those that it needs; the core imports no wing but in the lists. Without its folders, tests and lines
everything else still works, except wings that need it.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from multiprocessing import get_context
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.test_imports import ROOT, SOURCES, imports_of

GATEWAY = "services/gateway"
WORKER = "services/worker"
SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
LISTS = (
    "cli/commands.py",
    f"{GATEWAY}/app.py",
    "services/tokenizer/prepare.py",
    "services/tokenizer/service.py",
    "services/tokenizer/text_model.py",
    "services/scheduler/service.py",
    "services/scheduler/worker_state.py",
    f"{WORKER}/models/registry.py",
    f"{WORKER}/service.py",
    f"{WORKER}/startup/implementations.py",
    f"{WORKER}/step/parts.py",
    f"{WORKER}/weights/checkpoint.py",
    f"{WORKER}/weights/load.py",
    f"{WORKER}/weights/schemes/__init__.py",
    f"{WORKER}/weights/weight_placement.py",
    "shared/dialects/known.py",
    "shared/link/sockets/context.py",
    "shared/model_location.py",
    "shared/pooling.py",
    *(f"shared/settings/{name}.py" for name in (*SERVICES, "known")),
)
# Tests of several wings at once.
TOGETHER = (
    f"tests/{GATEWAY}/apis/together",
    "tests/services/agreement",
    "tests/exactness",
    "tests/hostile",
    "tests/mesh/test_agents.py",
    "tests/mesh/test_hostile_messages.py",
    "tests/sim",
)
# Of the engine for GPUs; the others are of kernels.
GPU_ENGINE_BENCHMARKS = (
    *("check", "engine_table", "host_times", "launches", "prompt_table", "results", "sections"),
    *("start", "step_launches", "store_table", "summary", "timeline"),
)
CORE_LINES = 37_717  # of services/ and shared/; 15,000 are the aim


class Wing(NamedTuple):
    """The first of its ``folders`` has the README. ``needs`` are the folders of other wings that it
    imports."""

    folders: tuple[str, ...]
    tests: tuple[str, ...]
    needs: tuple[str, ...] = ()


def api(
    name: str,
    *more_tests: str,
    more_folders: tuple[str, ...] = (),
    needs: tuple[str, ...] = (),
) -> Wing:
    folders = f"{GATEWAY}/apis/{name}", *more_folders
    return Wing(folders, (f"tests/{GATEWAY}/apis/{name}", *more_tests), needs)


TIMES = "services/scheduler/copy_times"
CHILD, CLIENT, LAYOUT = "shared/child_process", "shared/client", f"{WORKER}/block_layout"
WINGS = {
    "block_layout": Wing((LAYOUT,), (f"tests/{WORKER}/test_block_layout.py",)),
    "child_process": Wing((CHILD,), ()),
    "client": Wing((CLIENT,), ()),
    "copy_times": Wing((TIMES,), ()),
    "responses": api(
        "responses",
        "tests/mesh/test_responses.py",
        more_folders=("shared/responses",),
        needs=(CLIENT,),
    ),
    "messages": api("messages", "tests/mesh/test_messages.py"),
    "pooling": Wing(
        (
            f"{GATEWAY}/apis/pooling",
            "services/tokenizer/pairs",
            "shared/pooled",
            *(f"{WORKER}/{name}" for name in ("pooling", "encoders")),
        ),
        (
            f"tests/{GATEWAY}/apis/pooling",
            "tests/services/tokenizer/pairs",
            "tests/shared/test_pooling.py",
            f"tests/{WORKER}/test_pooling.py",
            f"tests/{WORKER}/encoders",
            f"tests/{WORKER}/adapters/test_plans.py",
            f"tests/{WORKER}/media/test_addition.py",
            f"tests/{WORKER}/ranks/test_pooling_of_stages.py",
            "benchmarks/encoders.py",
            "tests/encoder_models.py",
            "tests/mesh/test_encoders.py",
            "tests/offline/test_pooling.py",
        ),
    ),
    "invocations": api("invocations"),
    "tokenization": api("tokenization"),
    "aborts": api("aborts"),
    "mesh_state": api("mesh_state", "tests/mesh/test_mesh_state.py"),
    "batches": Wing(
        (f"{GATEWAY}/apis/batches", "shared/batch", "cli/batch"),
        (f"tests/{GATEWAY}/apis/batches", "tests/shared/batch", "tests/cli/batch"),
        needs=(CLIENT,),
    ),
    "guides": Wing(
        ("services/tokenizer/guides", f"{WORKER}/guides", "shared/guides"),
        (
            "tests/services/tokenizer/guides",
            f"tests/{WORKER}/guides",
            "tests/mesh/test_tool_formats.py",
            "tests/mesh/test_tools.py",
        ),
        needs=(CHILD,),
    ),
    "hosts": Wing(
        ("shared/link/hosts",),
        (
            "tests/shared/link/hosts",
            "tests/mesh/test_storm.py",
            "tests/mesh/test_tcp_mesh.py",
        ),
    ),
    "families": Wing(("shared/dialects/families",), ("tests/shared/dialects",)),
    "history": Wing(
        ("services/tokenizer/history",),
        ("tests/services/tokenizer/history", "tests/mesh/test_history.py"),
    ),
    "repetition": Wing(
        (f"{WORKER}/repetition",),
        (f"tests/{WORKER}/repetition",),
    ),
    "expert_loads": Wing((f"{WORKER}/expert_loads",), (f"tests/{WORKER}/expert_loads",)),
    "code_cache": Wing((f"{WORKER}/weights/cache",), (f"tests/{WORKER}/cache",)),
    "text": Wing((f"{GATEWAY}/text",), (f"tests/{GATEWAY}/text",)),
    "foreign": Wing(
        (f"{WORKER}/foreign",),
        (
            f"tests/{WORKER}/foreign",
            "tests/cli/test_transformers_models.py",
            "tests/gpu/test_transformers_on_cuda.py",
        ),
    ),
    "hybrids": Wing(
        (f"{WORKER}/hybrids",),
        (
            *(f"tests/{WORKER}/media/test_{name}.py" for name in ("parts_of_lfm2", "with_states")),
            *(
                f"tests/{WORKER}/test_{name}.py"
                for name in (
                    *("delta_backends", "gated_delta", "hybrid_families", "ling"),
                    *("published_hybrids", "texts_of_hybrids"),
                )
            ),
        ),
    ),
    "gemma4": Wing(
        (f"{WORKER}/gemma4",),
        (
            *(f"tests/{WORKER}/{name}" for name in ("assistant", "test_gemma4.py")),
            f"tests/{WORKER}/media/test_gemma4.py",
            "tests/cli/test_assistant.py",
        ),
    ),
    "eagle": Wing((f"{WORKER}/eagle",), (f"tests/{WORKER}/eagle", "tests/cli/test_eagle.py")),
    "indexed": Wing((f"{WORKER}/indexed",), (f"tests/{WORKER}/test_indexed.py",)),
    "device": Wing(
        (f"{WORKER}/engine/device", "shared/device"),
        (
            f"tests/{WORKER}/device",
            f"tests/{WORKER}/foreign/test_on_devices.py",
            f"tests/{WORKER}/media/test_device_engine.py",
            f"tests/{WORKER}/test_stack_experts.py",
            "tests/benchmarks/test_gpu_check.py",
            "tests/benchmarks/test_gpu_dry_run.py",
            "tests/benchmarks/test_gpu_step_launches.py",
            "tests/benchmarks/test_gpu_timeline.py",
            "tests/gpu",
            "tests/kernels/dry_engine.py",
            "tests/kernels/interpreted/test_change_logits.py",
            "tests/kernels/interpreted/test_engine.py",
            "tests/kernels/interpreted/test_torch_lm.py",
            "tests/kernels/test_change_logits.py",
            "tests/kernels/test_launches.py",
            "tests/kernels/test_programmatic_launch.py",
            "tests/mesh/device_worker.py",
            "tests/mesh/test_device_engine.py",
            "tests/mesh/test_device_stores.py",
            *(f"benchmarks/gpu/{name}.py" for name in GPU_ENGINE_BENCHMARKS),
        ),
    ),
    "cells": Wing(
        ("services/scheduler/cells",),
        (
            "tests/services/scheduler/cells",
            "tests/services/scheduler/adapters/test_moves.py",
            "tests/mesh/test_cells.py",
        ),
    ),
    "schemes": Wing(
        (f"{WORKER}/weights/schemes/tools",),
        (
            f"tests/{WORKER}/golden",
            f"tests/{WORKER}/test_schemes.py",
            f"tests/{WORKER}/test_torchao.py",
        ),
    ),
    "ranks": Wing(
        (f"{WORKER}/ranks",),
        (
            f"tests/{WORKER}/ranks",
            f"tests/{WORKER}/adapters/rank_texts.py",
            f"tests/{WORKER}/adapters/test_ranks.py",
            f"tests/{WORKER}/device/test_device_ranks.py",
            f"tests/{WORKER}/stores/test_ranks.py",
            f"tests/{WORKER}/stores/rank_texts.py",
            "tests/cli/test_hosts.py",
            "tests/cli/test_images_of_ernie.py",
            "tests/cli/test_images_of_ranks.py",
            "tests/cli/test_lost_ranks.py",
            "tests/cli/test_ranks.py",
            "tests/cli/test_stages.py",
            "tests/mesh/ranks_arena.py",
            "benchmarks/ranks.py",
        ),
    ),
    "offline": Wing(("shoal",), ("tests/offline",), needs=(CLIENT,)),
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
            "tests/gpu/test_adapters_on_cuda.py",
            "tests/kernels/interpreted/test_adapt.py",
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
            f"tests/{WORKER}/ranks/test_images_of_ranks.py",
            f"tests/{WORKER}/ranks/test_images_of_stages.py",
            f"tests/{WORKER}/test_texts_without_images.py",
            "tests/cli/test_images_of_ernie.py",
            "tests/cli/test_images_of_ranks.py",
            "tests/compose/test_encoders.py",
            "tests/gpu/test_images_on_cuda.py",
            "tests/mesh/encoders_arena.py",
            "tests/mesh/held_worker.py",
            "tests/mesh/test_image_encoders.py",
            "tests/mesh/test_images.py",
            "tests/mesh/test_odd_images.py",
            "tests/mesh/test_videos.py",
        ),
        needs=(CHILD,),
    ),
    "formats": Wing(
        ("shared/formats", f"{WORKER}/gguf", f"{WORKER}/paddle"),
        (
            "tests/shared/formats",
            f"tests/{WORKER}/gguf",
            f"tests/{WORKER}/paddle",
            "tests/cli/test_gguf.py",
            "tests/cli/test_paddle.py",
        ),
    ),
    "stores": Wing(
        (f"{WORKER}/stores", "services/scheduler/stores", "shared/stores"),
        (
            f"tests/{WORKER}/stores",
            "tests/services/scheduler/stores",
            "tests/gpu/test_stores_on_cuda.py",
            "tests/mesh/test_device_stores.py",
            "tests/mesh/test_stores.py",
            "benchmarks/sessions.py",
            "benchmarks/stores.py",
        ),
        needs=(LAYOUT, TIMES),
    ),
    "other_servers": Wing(
        ("shared/settings/other_servers",), ("tests/shared/settings/other_servers",)
    ),
    "adaptive_depth": Wing(
        ("services/scheduler/adaptive_depth",), ("tests/services/scheduler/adaptive_depth",)
    ),
    "later_share": Wing(
        ("services/scheduler/later_share",), ("tests/services/scheduler/later_share",)
    ),
    "promises": Wing(("services/scheduler/promises",), ("tests/services/scheduler/promises",)),
    "quarantine": Wing(
        ("services/scheduler/quarantine",), ("tests/services/scheduler/quarantine",)
    ),
    "moves": Wing(
        (f"{WORKER}/moves", "services/scheduler/moves"),
        (
            f"tests/{WORKER}/moves",
            "tests/services/scheduler/moves",
            "tests/mesh/moves_arena.py",
            "tests/mesh/test_moves.py",
            "benchmarks/moves.py",
        ),
        needs=(LAYOUT, TIMES),
    ),
    "page": Wing((f"{GATEWAY}/page",), (f"tests/{GATEWAY}/page", "tests/page")),
    "traces": Wing(
        (*(f"services/{service}/traces" for service in SERVICES), "cli/trace", "shared/traces"),
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
def test_a_wing_has_a_readme(wing: Wing) -> None:
    lines = (ROOT / wing.folders[0] / "README.md").read_text().splitlines()
    assert len(lines) <= 40
    assert all((ROOT / path).exists() for path in wing.tests)


def test_the_core_imports_no_wing_and_no_wing_another() -> None:
    found = [
        f"{place} imports {name}"
        for path in SOURCES
        for place in [str(path.relative_to(ROOT))]
        for name in imports_of(path)
        if place not in LISTS and wing_of(name.replace(".", "/")) not in known_to(wing_of(place))
    ]
    assert not found, "\n".join(found)


def test_only_tests_of_a_wing_import_it() -> None:
    users = {
        (*map(stem_of, (*wing.folders, *wing.tests)),): (
            *(test for each in with_users(wing) for test in each.tests),
            *TOGETHER,
        )
        for wing in WINGS.values()
    }
    found = [
        f"{place} imports {name}"
        for path in ROOT.glob("tests/**/*.py")
        for place in [str(path.relative_to(ROOT))]
        for name in imports_of(path)
        for module in [name.replace(".", "/")]
        for own, places in users.items()
        if module.startswith(own) and not place.startswith(places)
    ]
    assert not found, "\n".join(found)


def stem_of(test: str) -> str:
    return f"{test.removesuffix('.py')}/"


@cache
def wing_of(path: str) -> str | None:
    parents = [str(each) for each in Path(path).parents]
    return next((name for name, wing in WINGS.items() if {*wing.folders} & {*parents}), None)


def known_to(name: str | None) -> set[str | None]:
    """The wings that a wing, or the core, may import; None stands for the core."""
    needs = WINGS[name].needs if name is not None else ()
    return {None, name, *(wing_of(f"{folder}/README.md") for folder in needs)}


def with_users(wing: Wing) -> list[Wing]:
    """The wing, and the wings that need it."""
    return [each for each in WINGS.values() if each is wing or {*wing.folders} & {*each.needs}]


def test_the_core_stays_small() -> None:
    folders = ("services/", "shared/")
    places = [str(path.relative_to(ROOT)) for path in SOURCES]
    core = [each for each in places if each.startswith(folders) and wing_of(each) is None]
    assert sum(len((ROOT / each).read_text().splitlines()) for each in core) <= CORE_LINES


@pytest.fixture(scope="module")
def forks() -> BaseContext:
    """Processes with large libraries, and nothing of ours."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["aiohttp.web", "pydantic_settings", "torch"])
    return context


@pytest.mark.parametrize(
    "gone",
    [
        pytest.param([*WINGS.values()], id="all"),
        *(
            pytest.param(with_users(each), id=name, marks=pytest.mark.slow)
            for name, each in WINGS.items()
        ),
    ],
)
def test_without_a_wing_the_others_start(gone: list[Wing], forks: Any) -> None:
    """And the core without all of them."""
    process = forks.Process(target=start_without, args=[gone])
    process.start()
    process.join()
    assert process.exitcode == 0


def start_without(gone: list[Wing]) -> None:
    """Imports the services of wings as if their folders and their lines in the lists were gone."""
    sys.meta_path.insert(0, Without(gone))
    for service in {service for wing in gone for service in services_of(wing)}:
        import_module(f"{service.replace('/', '.')}.service")


class Without(MetaPathFinder):
    """Hides wings from imports."""

    def __init__(self, gone: list[Wing]) -> None:
        self._gone = gone
        self._folders = [f"{folder.replace('/', '.')}." for wing in gone for folder in wing.folders]

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if f"{name}.".startswith((*self._folders,)):
            raise ModuleNotFoundError(f"{name} is gone", name=name)
        path = f"{name.replace('.', '/')}.py"
        return spec_from_loader(name, Shortened(self._gone, path)) if path in LISTS else None


class Shortened(SourceLoader):
    """A list without the lines of wings."""

    def __init__(self, gone: list[Wing], path: str) -> None:
        self._gone, self._path = gone, ROOT / path

    def get_filename(self, _: str) -> str:
        return str(self._path)

    def get_data(self, _: str | bytes) -> bytes:
        text = self._path.read_text()
        for wing in self._gone:
            text = "".join(lines_without(wing, text))
        return text.encode()


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
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(folder), "TESTS_WITHOUT_A_WING": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    return done.stdout


def cut(wing: Wing, copy: Path) -> None:
    """Makes a ``copy`` of the tree without the wing and its users, their tests and their lines in
    the lists."""
    for path in ROOT.glob("[!.]*"):
        if path.is_dir():
            shutil.copytree(path, copy / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, copy)
    gone = with_users(wing)
    for place in {*TOGETHER, *(each for one in gone for each in (*one.folders, *one.tests))}:
        path = copy / place
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    project = copy / "pyproject.toml"
    for each in gone:
        for folder in each.folders:
            project.write_text(project.read_text().replace(f', "{folder}"', ""))
        for place in LISTS:
            (copy / place).write_text("".join(lines_without(each, (copy / place).read_text())))


def lines_without(wing: Wing, text: str) -> Iterator[str]:
    modules = [f"{folder}.".replace("/", ".") for folder in wing.folders]
    either = "|".join(map(re.escape, modules))
    names = re.findall(rf"^from (?:{either})\w+ import (\w+)$", text, re.MULTILINE)
    for line in text.splitlines(keepends=True):
        if not re.search(either, line) and line.strip() not in {f"{name}," for name in names}:
            yield line

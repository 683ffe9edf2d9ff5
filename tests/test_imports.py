"""Allowed imports between packages, read from the syntax tree."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from shared.version import VERSION

ROOT = Path(__file__).parent.parent
OURS = {"cli", "kernels", "services", "shared", "shoal", "models", "benchmarks", "tests"}
SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
SOURCES = sorted(
    path
    for folder in ("cli", "kernels", "services", "shared", "shoal")
    for path in ROOT.glob(f"{folder}/**/*.py")
)
ONLY_IN = {
    "zmq": ("shared/link/hosts/", "shared/link/keys.py", "cli/keys.py"),
    "torch": (
        *("services/worker/", "kernels/"),
        *(
            "cli/doctor/device.py",
            "cli/models/check_config.py",
            "cli/plan/footprint.py",
            "cli/plan/machine.py",
        ),
    ),
    "huggingface_hub": ("shared/model_location.py", "cli/models/found.py"),
    "transformers": (
        *("services/tokenizer/", "services/worker/"),
        *("shared/foreign_config.py", "shared/formats/older_tokenizer.py"),
    ),
    "opentelemetry": ("services/gateway/traces/otlp.py",),
    "cryptography": ("services/gateway/apis/responses/requests/reasoning_cipher.py",),
    "PIL": ("services/tokenizer/media/",),
    "llguidance": ("services/tokenizer/", "services/worker/"),
    "tokenizers": ("services/tokenizer/", "services/worker/", "cli/bench/pieces.py", "cli/plan/"),
}
FLOORS: dict[str, list[set[str]]] = {  # lowest first
    "gateway": [
        {"__init__", "metrics"},
        {"mesh"},
        {"http"},
        {"chat"},
        {"api"},
        {"chat.endpoint", "traces", "page", "apis", "text", "media"},
        {"app"},
        {"service"},
        {"__main__"},
    ],
    "scheduler": [
        {"__init__", "eviction", "limits"},
        {"block_pool"},
        {"allocation"},
        {"sequence"},
        {"kv_blocks", "decode_times"},
        {"queues", "plan_builder", "resource"},
        {"adaptive_depth", "priority_share", "promises.step_model", "promises.stream_share"},
        {"later_share"},
        {"worker_state"},
        {"results", "placement", "prefills"},
        {"preemption"},
        {"planner"},
        {"scheduler"},
        # Modules with a clock, metrics or logs, and those the service uses before the core.
        {"tokens_message"},
        {"extension"},
        {"metrics", "traces", "copy_times"},
        {"intake", "cells", "promises", "quarantine", "adapters", "media", "moves", "stores"},
        {"service"},
        {"__main__"},
    ],
    "worker": [
        {
            "__init__",
            "config",
            "guides",
            "slots",
            "metrics",
        },
        {"plan_check"},
        {"machine"},
        {"layers"},
        {
            *("models", "repetition", "step"),
            *(f"{wing}.families" for wing in ("gemma4", "hybrids", "indexed", "media")),
        },
        {
            *("backends", "expert_loads", "gemma4", "gguf", "hybrids", "indexed", "paddle"),
            *("eagle", "speculation", "weights"),
        },
        {"startup"},
        {"block_layout"},
        {"adapters", "encoders", "foreign", "media", "moves", "pooling", "stores", "engine"},
        {"attachment", "ranks", "step_thread"},
        {"extension"},
        {
            *("adapters.extension", "media.extension", "moves.extension", "ranks.extension"),
            *("media.encoder_service", "stores.extension", "stores.disk_link", "traces"),
        },
        {"service"},
        {"__main__"},
    ],
}
COMMANDS_MAY_IMPORT = {
    # Drives an engine without the services around it.
    "cli/bench/engine_loop.py": ("shared.", "services.scheduler.", "services.worker."),
    # Uses a service's own code, without the service.
    "cli/models/check_config.py": ("shared.", "services.worker."),
    "cli/tokenize.py": ("cli.", "shared.", "services.tokenizer."),
    "cli/doctor/device.py": ("services.worker.machine.",),
    "cli/collect_env.py": ("cli.", "shared.", "kernels.cpu."),
    # The text held out of the embedded model's training.
    "cli/bench/pieces.py": ("shared.", "models.training.corpus."),
    # Uses the worker's memory calculation, and the scheduler's code for simulations.
    "cli/plan/footprint.py": ("cli.", "shared.", "services.worker."),
    "cli/plan/machine.py": ("cli.", "shared.", "services.worker."),
    "cli/plan/replay.py": ("cli.", "shared.", "services.scheduler."),
    "cli/plan/simulated_worker.py": ("cli.", "shared.", "services.scheduler."),
}
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load"}
UNSAFE_METHODS = ("recv_pyobj", "send_pyobj")
# A part of the text of each file that is unsafe; syntax trees of all files take seconds.
SUSPECT = re.compile(
    r"pickle|dill|joblib|marshal|shelve|_pyobj|(?<![.\w])(eval|exec|torch\.load|yaml\.load)\b"
)

# Of statements with statements in them.
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Expressions, most of a tree, have none."""
    for block in BLOCKS:
        inner = getattr(node, block, ())
        for each in inner if isinstance(inner, list) else ():
            yield each
            yield from statements(each)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Absolute dotted names of the imports of ``path``."""
    names: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def may_import_ours(place: str) -> tuple[str, ...]:
    """Prefixes of our own modules that a file at ``place`` may import."""
    folder = place.split("/")[0]
    if folder == "shared":
        return ("shared.",)
    if folder == "kernels":
        return ("kernels.",)
    if folder == "shoal":
        return ("shoal.", "cli.", "shared.")
    if folder == "cli":
        return COMMANDS_MAY_IMPORT.get(place, ("cli.", "shared."))
    service = place.split("/")[1]
    also = ("kernels.",) if service == "worker" else ()
    return (f"services.{service}.", "shared.", *also)


def test_modules_import_only_within_the_rules_of_their_places() -> None:
    found = [
        f"{place} imports {name}"
        for path in SOURCES
        for place in [str(path.relative_to(ROOT))]
        for name in imports_of(path)
        if is_forbidden(name, place)
    ]
    assert not found, "\n".join(found)


def is_forbidden(name: str, place: str) -> bool:
    top = name.split(".")[0]
    if top in OURS:
        return not name.startswith(may_import_ours(place))
    return top in ONLY_IN and not place.startswith(ONLY_IN[top])


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("services.worker.service.main", "services/scheduler/service.py"),
        ("services.scheduler.scheduler.Scheduler", "shared/link/link.py"),
        ("torch", "services/scheduler/scheduler.py"),
        ("zmq", "services/gateway/service.py"),
    ],
)
def test_a_forbidden_import_is_found(name: str, place: str) -> None:
    assert is_forbidden(name, place)


def test_no_modules_import_each_other_in_a_circle():
    """Includes imports for types only, and imports in functions."""
    modules = {module_name(path): path for path in SOURCES}
    graph = {
        name: modules_of(imports_of(path), set(modules)) - {name} for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()


def test_messages_are_imported_from_their_package() -> None:
    package = ROOT / "shared" / "wire" / "messages"
    paths = [each for each in ROOT.glob("[!.]*/**/*.py") if package not in each.parents]
    users = [each for each in paths if "shared.wire.messages" in each.read_text()]
    names = {name for path in users for name in imports_of(path)}
    assert not {name for name in names if re.match(r"shared\.wire\.messages\.[a-z]", name)}


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("service", FLOORS)
def test_rooms_import_only_from_their_own_floor_and_lower_ones(service: str):
    folder = ROOT / "services" / service
    floors = {room: number for number, rooms in enumerate(FLOORS[service]) for room in rooms}
    for path in folder.glob("**/*.py"):
        above = floors[room_of(path.relative_to(folder).with_suffix("").parts, floors)]
        for name in imports_of(path):
            _, _, place = name.partition(f"services.{service}.")
            if place:
                below = floors[room_of(tuple(place.split(".")), floors)]
                assert below <= above, f"{path} imports {name} from a floor above"


def room_of(parts: tuple[str, ...], floors: dict[str, int]) -> str:
    """The longest prefix of a module's name that is a room."""
    names = [".".join(parts[:num]) for num in range(len(parts), 0, -1)]
    return next(name for name in names if name in floors)


def modules_of(names: frozenset[str], modules: set[str]) -> set[str]:
    """The modules of ``names``, which may be modules themselves."""
    return {name for name in names | {name.rpartition(".")[0] for name in names} if name in modules}


def test_nothing_is_unpickled_or_evaluated() -> None:
    paths = sorted(ROOT.glob("[!.]*/**/*.py"))
    suspects = [path for path in paths if SUSPECT.search(path.read_text())]
    found = [f"{path}: {each}" for path in suspects for each in unsafe(path)]
    assert not found, "\n".join(found)


def unsafe(path: Path) -> Iterator[str]:
    yield from {name.split(".")[0] for name in imports_of(path)} & UNSAFE_MODULES
    nodes = ast.walk(ast.parse(path.read_text()))
    for call in (node for node in nodes if isinstance(node, ast.Call)):
        called = ast.unparse(call.func)
        if called in UNSAFE_CALLS or called.endswith(UNSAFE_METHODS):
            yield f"line {call.lineno}: {called}"
        if "allow_pickle" in {keyword.arg for keyword in call.keywords}:
            yield f"line {call.lineno}: allow_pickle"


@pytest.mark.parametrize(
    "line",
    [
        "from pickle import loads",
        "import torch\n\ntorch.load('x')",
        "eval('1')",
        "socket.recv_pyobj()",
        "numpy.load('x', allow_pickle=False)",
    ],
)
def test_unpickling_and_evaluation_are_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "unsafe.py"
    file.write_text(line)
    assert SUSPECT.search(line)
    assert [*unsafe(file)]


def test_clocks_are_read_through_the_module_time():
    """The simulator replaces them there (tests/sim)."""
    found = [
        str(path)
        for path in SOURCES
        if path.relative_to(ROOT).parts[0] in ("services", "shared")
        for name in imports_of(path)
        if name.startswith("time.")
    ]
    assert not found


@pytest.mark.parametrize("service", ["gateway", "scheduler"])
def test_gateway_and_scheduler_start_without_torch_and_transformers(service: str):
    code = (
        f"import sys, services.{service}.service\n"
        "found = {'torch', 'transformers', 'tokenizers', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_our_kernels_are_not_taken_for_the_package_of_hugging_face():
    from transformers.utils.import_utils import is_kernels_available

    assert not is_kernels_available()
    assert (ROOT / "kernels" / "__init__.py").read_text() == ""
    assert not list(ROOT.glob("*.egg-info"))
    assert importlib.metadata.version("shoal") == VERSION


def test_no_benchmark_imports_tests():
    paths = ROOT.glob("benchmarks/**/*.py")
    for path in (each for each in paths if "tests" in each.read_text()):
        found = {name for name in imports_of(path) if name.split(".")[0] == "tests"}
        assert not found, f"{path} imports {found}"

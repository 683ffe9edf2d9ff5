"""Who may import whom: the walls of the house, read from the syntax tree."""

import ast
import importlib.metadata
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"cli", "kernels", "services", "shared", "models", "benchmarks", "tests"}
SERVICES = ("gateway", "tokenizer", "scheduler", "worker")
SOURCES = sorted(
    path
    for folder in ("cli", "kernels", "services", "shared")
    for path in ROOT.glob(f"{folder}/**/*.py")
)
ONLY_IN = {
    "zmq": ("shared/sockets.py",),
    "torch": ("services/worker/", "kernels/"),
    "huggingface_hub": ("shared/model_location.py",),
    "transformers": ("services/tokenizer/", "services/worker/"),
    "tokenizers": ("services/tokenizer/", "services/worker/"),
}
FLOORS: dict[str, list[set[str]]] = {  # lowest first
    "gateway": [
        {"__init__", "metrics", "log_limit"},
        {"requests"},
        {"mesh"},
        {"responses"},
        {"http"},
        {"endpoints"},
        {"service"},
        {"__main__"},
    ],
    "worker": [
        {"__init__", "config", "slots", "metrics", "slot_log", "plan_check"},
        {"machine", "layers"},
        {"models", "step"},
        {"backends", "speculation", "weights"},
        {"startup"},
        {"engine"},
        {"service"},
        {"__main__"},
    ],
}
IN_PROCESS = "cli/bench/engine_loop.py"  # drives an engine without the services around it
UNSAFE_MODULES = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}


def imports_of(path: Path) -> set[str]:
    """Absolute dotted names of what ``path`` imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def may_import_ours(place: str) -> tuple[str, ...]:
    """Prefixes of our own modules that a file at ``place`` may import."""
    folder = place.split("/")[0]
    if folder == "shared":
        return ("shared.",)
    if folder == "kernels":
        return ("kernels.",)
    if place == IN_PROCESS:
        return ("shared.", "services.scheduler.", "services.worker.")
    if folder == "cli":
        return ("cli.", "shared.")
    service = place.split("/")[1]
    also = ("kernels.",) if service == "worker" else ()
    return (f"services.{service}.", "shared.", *also)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_place_allows(path: Path):
    place = str(path.relative_to(ROOT))
    for name in imports_of(path):
        top = name.split(".")[0]
        if top in OURS:
            assert name.startswith(may_import_ours(place)), f"{place} imports {name}"
        if top in ONLY_IN:
            assert place.startswith(ONLY_IN[top]), f"{place} imports {name}"


def test_no_modules_import_each_other_in_a_circle():
    """What is imported for types alone, or in a function, counts too."""
    modules = {module_name(path): path for path in SOURCES}
    graph = {
        name: modules_of(imports_of(path), set(modules)) - {name} for name, path in modules.items()
    }
    TopologicalSorter(graph).prepare()


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("service", FLOORS)
def test_rooms_import_only_from_their_own_floor_and_those_below(service: str):
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
    """The longest beginning of a module's name that is a room."""
    names = [".".join(parts[:num]) for num in range(len(parts), 0, -1)]
    return next(name for name in names if name in floors)


def modules_of(names: set[str], modules: set[str]) -> set[str]:
    """The modules in which ``names`` are, or which they are."""
    return {name for name in names | {name.rpartition(".")[0] for name in names} if name in modules}


@pytest.mark.parametrize("path", sorted(ROOT.glob("[!.]*/**/*.py")), ids=str)
def test_nothing_is_unpickled_or_evaluated(path: Path):
    tops = {name.split(".")[0] for name in imports_of(path)}
    assert not tops & UNSAFE_MODULES, path
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"eval", "exec", "torch.load", "yaml.load"}, f"{path}: {called}"
            assert not called.endswith(("recv_pyobj", "send_pyobj")), f"{path}: {called}"
            assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, path


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
    assert importlib.metadata.version("shoal").startswith("20")


def test_no_benchmark_imports_tests():
    for path in ROOT.glob("benchmarks/**/*.py"):
        found = {name for name in imports_of(path) if name.split(".")[0] == "tests"}
        assert not found, f"{path} imports {found}"

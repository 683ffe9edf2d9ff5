"""Settings of all tests.

No example has a deadline: the machine may be busy. ``make test`` tries the same examples each time,
so that only a change makes it fail; ``make test-all`` draws new ones (``--hypothesis-profile
search``).
"""

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from prometheus_client import REGISTRY

from shared.process.log import REQUESTS

Lines = Callable[[], list[str]]
Value = tuple[tuple[str, ...], tuple[int, ...]]

search = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.register_profile("search", search)
settings.register_profile("same", search, derandomize=True, max_examples=50)
settings.load_profile("same")

TESTS = Path(__file__).parent
gc.disable()  # for a sixth less time, until all files are imported
collect_ignore = ["clients", "page"]  # they have environments of their own
# Prefixes of slow files.
WAITING = ("mesh", "cli")
COMPUTING = (
    "sim",
    "exactness",
    "benchmarks",
    "services/worker/test_speculation",
    "services/worker",
    "kernels",
)


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_rests_slow(items)
    alternate(items)


def mark_rests_slow(items: list[pytest.Item]) -> None:
    """Of each test, every value of every parameter stays in at least one case that is not slow; a
    greedy cover, the same in each run, and another one of the cases for a card."""
    tests: dict[tuple[str, str, bool], list[tuple[pytest.Function, set[Value]]]] = {}
    for item in items:
        if not hasattr(item, "callspec") or item.get_closest_marker("slow"):
            continue
        assert isinstance(item, pytest.Function)
        assert item.parent is not None
        key = item.parent.nodeid, item.originalname, item.get_closest_marker("gpu") is not None
        tests.setdefault(key, []).append((item, values_of(item)))
    for cases in tests.values():
        missing = set.union(*(values for _, values in cases))
        while missing:
            best = max(cases, key=lambda case: len(case[1] & missing))
            cases.remove(best)
            missing -= best[1]
        for item, _ in cases:
            item.add_marker("slow")


def values_of(item: pytest.Function) -> set[Value]:
    """The names of each ``parametrize`` and of each fixture with parameters, with the identities
    of their values in this case."""
    groups = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0]
        groups.append(tuple(names.replace(" ", "").split(",") if isinstance(names, str) else names))
    params = item.callspec.params
    named = {name for names in groups for name in names}
    groups.extend((name,) for name in params if name not in named)
    return {(names, tuple(id(params[name]) for name in names)) for names in groups}


def alternate(items: list[pytest.Item]) -> None:
    """Files that mostly wait for processes alternate with files that compute, so that cores are
    never idle; short files come last, so that no long one is left alone."""
    files = dict.fromkeys(item.path for item in items)
    names = {path.relative_to(TESTS).as_posix(): path for path in files}
    turns = dict.fromkeys(files, 1.0)
    for starts in (WAITING, COMPUTING):
        found = dict.fromkeys(
            names[name] for start in starts for name in names if name.startswith(start)
        )
        turns |= {path: index / len(found) for index, path in enumerate(found)}
    items.sort(key=lambda item: turns[item.path])


def pytest_collection_finish() -> None:
    """Imported objects are permanent: garbage collections, one of them in each graph capture, skip
    them. torch has one thread: tiny GEMMs are faster with it, and other processes need the cores.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if "torch" in sys.modules:  # the import takes a second, which most files do not need
        sys.modules["torch"].set_num_threads(1)


def pytest_unconfigure() -> None:
    """Otherwise Triton's bindings report the remaining objects as leaks."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # takes a second, which most tests do not need

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short path: a Unix socket's path has at most 107 bytes, and pytest's own folders are long
    in parallel runs."""
    with TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def change() -> Callable[[str], float]:
    """The growth of a sample without labels since the test began, by its name."""
    before = {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if not sample.labels
    }
    return lambda name: (REGISTRY.get_sample_value(name) or 0.0) - before.get(name, 0.0)


@pytest.fixture
def log_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Lines]:
    """For tests that set up logging: the output since the last call. Restores logging
    afterwards."""
    monkeypatch.setattr(logging.root, "handlers", [])
    levels = logging.root.level, REQUESTS.level

    def lines() -> list[str]:
        for handler in logging.root.handlers:
            handler.flush()
        return capfd.readouterr().err.removesuffix("\n").split("\n")

    yield lines
    logging.root.setLevel(levels[0])
    REQUESTS.setLevel(levels[1])

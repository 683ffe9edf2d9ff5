"""Settings of all tests.

No example has a deadline: the machine may be busy with something else. ``make test`` tries the same
examples each time, so that it fails for a change and not by chance; ``make test-all`` draws new
ones (``--hypothesis-profile search``).
"""

import gc
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from prometheus_client import REGISTRY

from shared.process.log import REQUESTS

Lines = Callable[[], list[str]]

search = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=False)
settings.register_profile("search", search)
settings.register_profile("same", search, derandomize=True)
settings.load_profile("same")

TESTS = Path(__file__).parent
collect_ignore = ["clients", "page"]  # they have environments of their own
# Files that take long, by how they begin.
WAITING = ("mesh", "cli")
COMPUTING = ("benchmarks", "services/worker/test_speculation", "services/worker", "kernels")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that wait for processes most of the time take turns with files that compute, so that
    cores are idle at no time; the short ones come last, so that no long one is left alone."""
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
    """What was imported stays: searches for garbage, of which a capture of graphs makes one, pass
    over it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else what is left at the end is reported as leaks, by Triton's bindings."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # takes a second, which most tests need not wait for

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A short one: the path of a Unix socket has 107 bytes at most, of which pytest's own folders
    take many where tests run side by side."""
    with TemporaryDirectory(prefix="shoal-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def change() -> Callable[[str], float]:
    """By how much a sample without labels has grown since the test began, by its name."""
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
    """For tests that set up logging: what was written since the last call. Afterwards logging is
    as it was."""
    monkeypatch.setattr(logging.root, "handlers", [])
    levels = logging.root.level, REQUESTS.level

    def lines() -> list[str]:
        for handler in logging.root.handlers:
            handler.flush()
        return capfd.readouterr().err.removesuffix("\n").split("\n")

    yield lines
    logging.root.setLevel(levels[0])
    REQUESTS.setLevel(levels[1])

"""Links on one machine run on uvloop, the production loop; in slow tests also on asyncio's own."""

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

ON_BOTH = ("test_link.py", "test_local.py")

LoopFactory = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    factories: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in ON_BOTH:
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.hookimpl(tryfirst=True)  # before ``-m`` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.name in ON_BOTH and "asyncio" in item.name.rpartition("[")[2]:
            item.add_marker("slow")

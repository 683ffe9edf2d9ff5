"""Links on one machine run on asyncio's own loop and on uvloop, the production loop."""

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

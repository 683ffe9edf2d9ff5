from collections.abc import Iterator

import pytest

from benchmarks.harness.docker_engine import NoEngine, provide_base_images, running_engine


@pytest.fixture(scope="module")
def engine() -> Iterator[dict[str, str]]:
    try:
        with running_engine() as environment:
            provide_base_images(environment)
            yield environment
    except NoEngine as reason:
        pytest.skip(str(reason))

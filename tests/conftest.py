from collections.abc import Callable

import pytest
from prometheus_client import REGISTRY


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

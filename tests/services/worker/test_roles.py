"""The service of each role."""

from typing import Any

import pytest

from services.worker import __main__ as worker
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig


def test_an_encoder_needs_the_part_that_reads_images(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(worker, "ENCODERS", [made.append])
    config = WorkerConfig(worker_role="encoder")
    worker.service_of(config)
    assert made == [config]
    monkeypatch.setattr(worker, "ENCODERS", [])
    with pytest.raises(ConfigError, match="worker-role: encoder: images are not a part of this"):
        worker.service_of(config)

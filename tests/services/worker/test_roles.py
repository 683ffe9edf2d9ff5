"""The service of each role, and settings of parts that are not installed."""

from typing import Any

import pytest
import torch

from services.worker import __main__ as worker
from services.worker.startup import implementations
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


def test_loads_of_experts_need_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations, "PARTS", {})
    model: Any = None
    with pytest.raises(ConfigError, match="enable-expert-distribution-metrics: loads of experts"):
        implementations.count_loads(model, torch.device("cpu"))

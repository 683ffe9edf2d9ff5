"""Workers that claim a GPU each, by the ids that torch reads from real GPUs."""

from pathlib import Path

import pytest
import torch

from services.worker.machine.hardware import choose_device
from shared.errors import ConfigError

pytestmark = pytest.mark.gpu


def test_each_gpu_is_taken_once_by_its_uuid(tmp_path: Path) -> None:
    num_gpus = torch.cuda.device_count()
    before = torch.cuda.current_device()
    try:
        for index in range(num_gpus):
            assert choose_device("auto", tmp_path) == torch.device("cuda", index)
            assert torch.cuda.current_device() == index
    finally:
        torch.cuda.set_device(before)
    uuids = {str(torch.cuda.get_device_properties(index).uuid) for index in range(num_gpus)}
    assert {path.stem for path in tmp_path.iterdir()} == uuids
    with pytest.raises(ConfigError, match=f"all {num_gpus} GPUs are taken"):
        choose_device("auto", tmp_path)

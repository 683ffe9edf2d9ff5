"""Models that the operators of GPUs refuse, by the layer's name."""

import re

import pytest
import torch

from services.worker.engine.device.kernels import choose_device_kernels
from services.worker.weights.load import quantize
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig
from tests.services.worker.test_stack_experts import linears, make


def test_experts_in_several_forms_are_refused_by_the_layers_name() -> None:
    model = make()
    quantize(linears(model, "down_proj")[1][2], "wint8")
    message = "model.layers.1.mlp: weights of experts that are not in one form"
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_device_kernels(model, WorkerConfig(), torch.float32)


def test_sizes_that_kernels_do_not_read_are_refused() -> None:
    model = make(moe_intermediate_size=20)
    message = "experts of (96, 20) outputs and inputs, no multiples of 8"
    with pytest.raises(ConfigError, match=re.escape(message)):
        choose_device_kernels(model, WorkerConfig(), torch.float32)

"""A model on interpreted kernels, compared with steps prepared by the host."""

import msgspec
import pytest
import torch

from services.worker.backends.torch_lm import TorchLM
from services.worker.engine.device.stack_experts import stack_experts
from tests.services.worker.device_contexts import OnDevice
from tests.services.worker.test_native import (
    EXPERTS,
    SHAPES,
    furthest,
    make_config,
    make_model,
    random_prompts,
    run,
)


@pytest.mark.parametrize(
    "name",
    [
        *list(SHAPES)[:3],
        "Gemma 2, windows, caps, tied",
        "GLM-4.5, heads rotated in part, groups",
        "DeepSeek-V3, latents, yarn",
        "gpt-oss, experts with biases, sinks, windows",
        pytest.param(EXPERTS, marks=pytest.mark.slow),
    ],
)
def test_float32_logits_do_not_depend_on_the_side_that_knows_the_lengths(name: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1}
    config = msgspec.structs.replace(make_config(name), **sizes)
    prompts, dtype = random_prompts(1, 9), torch.float32
    models = [make_model(config, dtype) for _ in range(2)]
    for model in models:
        stack_experts(model)
    expected = run(TorchLM(models[0]), config, dtype, prompts, 6)
    found = run(OnDevice(TorchLM(models[1])), config, dtype, prompts, 6)
    assert all(logits.std() > 0.05 for logits in expected)
    assert furthest(found, expected) < 1e-4

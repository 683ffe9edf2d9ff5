"""The operators of a model's steps on a GPU."""

import logging

import torch

from services.worker.backends.operators import PLAIN, Operators
from services.worker.backends.torch_lm import DEVICE, TorchLM
from services.worker.engine.device.stack_experts import stack_experts
from services.worker.machine.hardware import gpu_name
from services.worker.metrics import show_device
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.choose_backend import refusing
from services.worker.step.sampler import Sampler, TorchSampler
from shared.errors import ConfigError
from shared.settings.worker import WorkerConfig

log = logging.getLogger(__name__)


def choose_device_kernels(
    model: DecoderLM | CausalLM,
    settings: WorkerConfig,
    dtype: torch.dtype,
    operators: Operators = PLAIN,
) -> tuple[CausalLM, Sampler]:
    """Does the same as ``choose_kernels`` for the device engine, which samples by itself. Raises
    ConfigError."""
    if settings.activation_dtype != "auto":
        raise ConfigError(
            f"activation-dtype: {settings.activation_dtype} is for native code on a CPU, and this"
            " worker computes on a GPU"
        )
    show_device(gpu_name(), "triton", torch.get_num_threads())
    if not isinstance(model, DecoderLM):
        log.info("kernels: torch's operators, attention by Triton")
        return model, TorchSampler()
    with refusing("the operators of GPUs"):
        computed = TorchLM(model, DEVICE, operators.device)
        stack_experts(model)
    log.info("kernels: Triton's")
    return computed, TorchSampler()

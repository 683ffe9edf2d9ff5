"""What the steps of a model are computed with: our native CPU code where it can run the model, else
torch's operators. Native code samples whatever the model runs on, if that is a CPU."""

import logging

import torch

from kernels.cpu.decoder import DTYPES, NativeLibrary
from kernels.cpu.library import find_variant, load_library
from kernels.cpu.sampler import NativeSampler
from services.worker.hardware import bound_kernel_caches, num_cores
from services.worker.model_config import ModelConfig
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.models.native import NativeLM, decoder_shape
from services.worker.sampler import Sampler, TorchSampler
from shared.config import WorkerConfig

log = logging.getLogger(__name__)


def choose_kernels(
    model: CausalLM,
    config: ModelConfig,
    settings: WorkerConfig,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[CausalLM, Sampler]:
    """``model``, or what computes the same with native code, and what samples from its logits; sets
    the threads of either.

    Torch's threads wait for each other, so that one which has to share its core holds up all: one
    core is left to the services around us. Native threads hand out their work piece by piece.
    """
    if device.type != "cpu":
        log.info("kernels: torch's operators on %s", device)
        return model, TorchSampler()
    variant = find_variant()
    problem = _problem(model, config, settings, dtype, variant)
    if problem is not None or variant is None or not isinstance(model, DecoderLM):
        num_threads = settings.num_threads or max(1, num_cores() - 1)
        torch.set_num_threads(num_threads)
        bound_kernel_caches()
        log.info("kernels: torch's operators, %d threads (%s)", num_threads, problem)
        return model, _choose_sampler(settings, variant, num_threads)
    num_threads = settings.num_threads or num_cores()
    torch.set_num_threads(1)
    log.info("kernels: native code for %s, %d threads", variant, num_threads)
    library = NativeLibrary(load_library(variant), dtype, num_threads)
    native = NativeLM(model, decoder_shape(model, config, settings.block_size), library)
    return native, _choose_sampler(settings, variant, num_threads)


def _choose_sampler(settings: WorkerConfig, variant: str | None, num_threads: int) -> Sampler:
    if not settings.native_kernels or variant is None:
        return TorchSampler()
    return NativeSampler(load_library(variant), num_threads)


def _problem(
    model: CausalLM,
    config: ModelConfig,
    settings: WorkerConfig,
    dtype: torch.dtype,
    variant: str | None,
) -> str | None:
    """Why native code cannot be used."""
    if not settings.native_kernels:
        return "native-kernels is off"
    if variant is None:
        return "no native code was built that suits this CPU"
    if dtype not in DTYPES:
        return f"native code has no {dtype}"
    if not isinstance(model, DecoderLM):
        return "native code does not know this architecture"
    return decoder_shape(model, config, settings.block_size).problem()

"""What the steps of a model are computed with: fused operators on GPUs; on CPUs our native code
where it can run the model, else torch's operators."""

import ctypes
import logging

import torch

from kernels.cpu.decoder import DTYPES, NativeLibrary
from kernels.cpu.library import find_variant, load_library
from kernels.cpu.sampler import NativeSampler
from services.worker.backends.fused import FusedLM
from services.worker.backends.native import NativeLM, decoder_shape
from services.worker.machine.hardware import bound_kernel_caches, num_cores
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.step.sampler import Sampler, TorchSampler
from shared.config.worker import WorkerConfig
from shared.errors import ConfigError

log = logging.getLogger(__name__)


class _NotNative(Exception):
    """Native code cannot be used, and this is why."""


def choose_kernels(
    model: CausalLM, settings: WorkerConfig, dtype: torch.dtype
) -> tuple[CausalLM, Sampler]:
    """On a CPU: ``model``, or what computes the same with native code, and what samples from its
    logits; sets the threads of either.

    Torch's threads wait for each other, so that one which has to share its core holds up all: one
    core is left to the services around us. Native threads hand out their work piece by piece.
    """
    sampler: Sampler = TorchSampler()
    num_threads = settings.num_threads or num_cores()
    try:
        variant, library = _load(settings)
        sampler = NativeSampler(library, num_threads)
        if dtype not in DTYPES:
            raise _NotNative(f"native code has no {dtype}")
        native = _native(model, settings, NativeLibrary(library, dtype, num_threads))
    except _NotNative as problem:
        num_threads = settings.num_threads or max(1, num_threads - 1)
        torch.set_num_threads(num_threads)
        bound_kernel_caches()
        log.info("kernels: torch's operators, %d threads (%s)", num_threads, problem)
        return model, sampler
    torch.set_num_threads(1)
    log.info("kernels: native code for %s, %d threads", variant, num_threads)
    return native, sampler


def fuse(model: CausalLM, settings: WorkerConfig, dtype: torch.dtype) -> tuple[CausalLM, Sampler]:
    """Does the same as ``choose_kernels`` for the device engine, which samples by itself. Raises
    ConfigError."""
    if not isinstance(model, DecoderLM):
        raise ConfigError(f"model: {type(model).__name__} does not run on GPUs")
    log.info("kernels: Triton's, attention by %s", settings.attention_backend)
    return FusedLM(model), TorchSampler()


def _load(settings: WorkerConfig) -> tuple[str, ctypes.CDLL]:
    """The build for this CPU. Raises _NotNative."""
    if not settings.native_kernels:
        raise _NotNative("native-kernels is off")
    variant = find_variant()
    if variant is None:
        raise _NotNative("no native code was built that suits this CPU")
    try:
        return variant, load_library(variant)
    except OSError as error:
        raise _NotNative(f"native code does not load: {error}") from None


def _native(model: CausalLM, settings: WorkerConfig, library: NativeLibrary) -> NativeLM:
    """Raises _NotNative."""
    if not isinstance(model, DecoderLM):
        raise _NotNative("native code does not know this architecture")
    shape = decoder_shape(model, settings.block_size)
    if problem := shape.problem():
        raise _NotNative(problem)
    return NativeLM(model, shape, library)

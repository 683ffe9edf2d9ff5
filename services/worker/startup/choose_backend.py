"""The backend for a model's steps: Triton's operators on GPUs; on CPUs our native code if it can
run the model, else torch's operators."""

import ctypes
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from kernels.cpu.library import find_variant, load_library
from kernels.cpu.operators import DTYPES
from kernels.cpu.packing import NativeLibrary, can_round, is_whole, packed_form
from kernels.cpu.sampler import NativeSampler
from services.worker.backends.compiler import OnShare
from services.worker.backends.native import NativeLM
from services.worker.backends.operators import PLAIN, Operators
from services.worker.backends.torch_lm import HOST, TorchLM
from services.worker.layers.ops import NotSupported
from services.worker.layers.weights import Quantized
from services.worker.machine.hardware import bound_kernel_caches
from services.worker.metrics import show_device
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.ranks import ranks_of
from services.worker.step.sampler import Sampler, TorchSampler
from services.worker.weights.progress import Progress
from shared.errors import ConfigError
from shared.process.cores import num_cores
from shared.settings.worker import WorkerConfig

log = logging.getLogger(__name__)


def choose_kernels(
    model: DecoderLM | CausalLM,
    settings: WorkerConfig,
    dtype: torch.dtype,
    operators: Operators = PLAIN,
    progress: Progress = lambda text, share: None,
) -> tuple[CausalLM, Sampler]:
    """On a CPU: the backend of ``model``, if it does not compute itself, and the sampler for its
    logits; sets the threads of both. ``operators`` are the trunk's.

    Torch's threads wait for each other, so a thread that shares its core delays all the others: one
    core is left to the services around us. Native threads distribute their work in small pieces.
    Raises ConfigError if no backend can compute the model.
    """
    sampler: Sampler = TorchSampler()
    num_threads = settings.num_threads or num_cores()
    try:
        variant, library = _load(settings)
        sampler = NativeSampler(library, num_threads)
        report = partial(progress, "packing weights")
        native = _native(model, settings, dtype, library, num_threads, report, operators)
    except NotSupported as problem:
        if settings.activation_dtype != "auto":
            raise ConfigError(
                f"activation-dtype: {settings.activation_dtype} is for native code, which cannot"
                f" run the model: {problem}"
            ) from None
        num_threads = settings.num_threads or max(1, num_threads - 1)
        torch.set_num_threads(num_threads)
        bound_kernel_caches()
        show_device("cpu", "torch", num_threads)
        level = logging.WARNING if isinstance(model, DecoderLM) else logging.INFO
        text = "kernels: torch's operators, %d threads (no native code: %s)"
        log.log(level, text, num_threads, problem)
        if not isinstance(model, DecoderLM):
            return model, sampler
        with refusing("torch's operators"):
            return TorchLM(model, HOST, operators.torch), sampler
    torch.set_num_threads(1)
    show_device("cpu", variant, num_threads)
    log.info("kernels: native code for %s, %d threads", variant, num_threads)
    return native, sampler


@contextmanager
def refusing(operators: str) -> Iterator[None]:
    """Raises ConfigError instead of NotSupported."""
    try:
        yield
    except NotSupported as problem:
        raise ConfigError(f"model: {operators} cannot run it: {problem}") from None


def _load(settings: WorkerConfig) -> tuple[str, ctypes.CDLL]:
    """The build for this CPU. Raises NotSupported."""
    if not settings.native_kernels:
        raise NotSupported("native-kernels is off")
    if (variant := find_variant()) is None:
        raise NotSupported("none was built that suits this CPU")
    try:
        return variant, load_library(variant)
    except OSError as error:
        raise NotSupported(f"it does not load: {error}") from None


def _check_rounding(model: DecoderLM, library: ctypes.CDLL) -> None:
    """Raises NotSupported if activations would be rounded for no weights."""
    codes = [each.as_codes for each in model.modules() if isinstance(each, Quantized)]
    forms = {packed_form(each) for each in codes if is_whole(each)}
    if not forms:
        raise NotSupported("no weights of it are whole numbers, as those of wint8 and wint4 are")
    if not any(can_round(library, form) for form in forms):
        raise NotSupported("this CPU lacks AVX512-VNNI, which weights in 8 bits need")


def _native(
    model: DecoderLM | CausalLM,
    settings: WorkerConfig,
    dtype: torch.dtype,
    library: ctypes.CDLL,
    num_threads: int,
    report: OnShare,
    operators: Operators,
) -> CausalLM:
    """Raises NotSupported."""
    rounds = settings.activation_dtype == "int8"
    if not isinstance(model, DecoderLM) and (rounds or model.pack is None):
        raise NotSupported("transformers computes this model")
    if dtype not in DTYPES:
        raise NotSupported(f"it has no {dtype}")
    native = NativeLibrary(library, dtype, num_threads, rounds=rounds)
    if not isinstance(model, DecoderLM):
        model.pack(native)
        return model
    if rounds:
        _check_rounding(model, library)
    if (ranks := ranks_of(settings)) is not None:
        model.parallel = ranks.meet_natively(model.parallel, settings, library)
    return NativeLM(model, settings.block_size, native, report, operators.recorder)

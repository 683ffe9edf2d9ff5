"""The operators of the trunk, as an optional part of the worker may change them."""

from collections.abc import Callable
from typing import NamedTuple

from services.worker.backends.recorder import MakeRecorder, Recorder
from services.worker.backends.torch_lm import TorchOps


class Operators(NamedTuple):
    """``recorder`` of native code, ``torch`` and, on devices, ``device`` take the arguments of
    their defaults."""

    recorder: MakeRecorder = Recorder
    torch: Callable[..., TorchOps] = TorchOps
    device: Callable[..., TorchOps] = TorchOps


PLAIN = Operators()

"""The operators of the trunk, as an optional part of the worker may change them."""

from collections.abc import Callable
from typing import NamedTuple

from services.worker.backends.recorder import MakeRecorder, Recorder
from services.worker.backends.torch_lm import TorchOps


class Operators(NamedTuple):
    """``recorder`` for native code and ``torch`` take the arguments of their defaults."""

    recorder: MakeRecorder = Recorder
    torch: Callable[..., TorchOps] = TorchOps


PLAIN = Operators()

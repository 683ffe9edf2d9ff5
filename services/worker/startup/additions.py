"""Optional parts of a worker that take part in loading a model and in its steps."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch

from kernels.delta import LayerStates
from services.worker.backends.operators import PLAIN, Operators
from services.worker.machine.kv_cache import KVCache
from services.worker.models import CausalLM
from services.worker.models.decoder import DecoderLM
from services.worker.startup.implementations import ADDITIONS
from services.worker.step.batch import Batch
from services.worker.step.step import StepPart
from shared.settings.worker import WorkerConfig
from shared.wire.codec import Array
from shared.wire.messages import Capacity, StepPlan

States = tuple[Sequence[LayerStates], np.ndarray]


class PlanPart(StepPart[Any]):
    """Keeps its own state of slots. On the thread of the steps; on GPUs a part of each step."""

    is_of_every_step = True

    def apply(self, plan: StepPlan, pixels: Sequence[Array]) -> None:
        """Before the plan changes the slots. After an error nothing is changed. ``pixels`` are the
        plan's further buffers."""

    def lay_out(self, batch: Batch) -> Batch:
        """On a CPU before a forward pass of ``batch``, or several of decode rows. Returns it, with
        other positions of rotations and other embeddings if need be."""
        return batch

    def reset(self) -> None:
        """Forgets all sequences."""


class Addition(Protocol):
    @property
    def operators(self) -> Operators | None:
        """They compute the trunk; None: the usual ones."""

    def limit(self, capacity: Capacity) -> Capacity:
        """``capacity`` with its own limits."""

    def num_bytes(self, num_tokens: int) -> Mapping[str, int]:
        """The memory for it, in steps of up to ``num_tokens``: by purpose, for the log."""

    def begin(
        self, model: CausalLM, is_open: np.ndarray, kv_cache: KVCache, states: States
    ) -> PlanPart:
        """``model`` is the backend's. ``is_open`` [max_num_seqs] bool always has the slots' current
        state. ``states`` of all slots, then their copies, layer by layer; and their positions."""


class AdditionModule(Protocol):
    """A module that makes an addition if its setting is on."""

    def check(
        self, settings: WorkerConfig, device: torch.device, *, pools: bool, is_ours: bool
    ) -> None:
        """Before weights are read. Raises ConfigError for a combination that is not supported."""

    def make(
        self, settings: WorkerConfig, folder: Path, model: DecoderLM, dtype: torch.dtype
    ) -> Addition | None:
        """``model``, of ``folder``, is laid out; its backend is not chosen yet. None if there is
        nothing to add to it. Raises ConfigError."""


def make_additions(
    modules: Iterable[AdditionModule],
    settings: WorkerConfig,
    folder: Path,
    model: DecoderLM,
    dtype: torch.dtype,
) -> list[Addition]:
    """Raises ConfigError."""
    made = [module.make(settings, folder, model, dtype) for module in modules]
    return [each for each in made if each is not None]


def operators_of(additions: Iterable[Addition]) -> Operators:
    """Those of the first addition with its own."""
    return next((each.operators for each in additions if each.operators is not None), PLAIN)


def addition_modules(settings: WorkerConfig) -> Iterator[AdditionModule]:
    """Those whose settings are on."""
    for setting, module in ADDITIONS.items():
        if getattr(settings, setting):
            yield cast(AdditionModule, import_module(module))

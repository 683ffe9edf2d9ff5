"""Machines for a worker, and the number of KV blocks that fit."""

import math
from dataclasses import dataclass, replace

import torch
from msgspec import structs

from cli.plan.cards import Card
from cli.plan.footprint import Footprint
from services.worker.engine.host import HostEngine
from services.worker.machine.hardware import Memory, choose_device, read_memory
from services.worker.startup.plan_memory import MemoryReport, MemoryRequirements, plan_memory
from shared.errors import ConfigError
from shared.process.cores import num_cores
from shared.settings.worker import WorkerConfig
from shared.wire.kv_groups import tokens_that_fit
from shared.wire.messages import Capacity

NUMBERS_OF_CARDS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Fit:
    """A worker on ``num_cards``, or on this machine if that is 0; ``memory`` is per GPU."""

    name: str
    device: torch.device
    num_cards: int
    memory: MemoryReport

    def num_tokens(self, length: float) -> int:
        """Tokens in the KV cache if it is full of requests of this ``length``."""
        return tokens_that_fit(self.memory.capacity, math.ceil(length))

    @property
    def capacity(self) -> Capacity:
        """The capacity this worker would report, without drafts."""
        return structs.replace(
            self.memory.capacity,
            num_speculative_tokens=0,
            pooled_size=0,
            max_num_steps=HostEngine.max_num_steps if self.device.type == "cpu" else 1,
        )


def this_machine(settings: WorkerConfig) -> torch.device:
    """Raises ConfigError if there is no such device."""
    return choose_device(settings.device, settings.gpu_claims)


def shares_its_cores(settings: WorkerConfig) -> bool:
    """True if a worker's steps occupy all cores of this machine."""
    device = this_machine(settings)
    return device.type == "cpu" and (settings.num_threads or num_cores()) >= num_cores()


def fit_here(settings: WorkerConfig, footprint: Footprint, device: torch.device) -> Fit:
    """Raises ConfigError with the memory calculation if the model does not fit."""
    before = read_memory(device, settings.numa_node)
    needs = footprint.on_gpu if device.type == "cuda" else footprint.requirements
    memory = plan_memory(settings, needs, before, device)
    return Fit(f"this machine ({device})", device, 0, memory)


def fit_on(card: Card, settings: WorkerConfig, footprint: Footprint) -> Fit:
    """The least number of GPUs that hold the model, each with its share of weights and KV cache.
    Raises ConfigError if ``NUMBERS_OF_CARDS`` are not enough."""
    problem = ConfigError(f"{card.name}: nothing was tried")
    device = torch.device("cuda")
    for num in NUMBERS_OF_CARDS:
        shared = _shared(footprint.on_gpu, num)
        before = Memory(card.memory, card.memory)
        try:
            memory = plan_memory(settings, shared, before, device)
        except ConfigError as error:
            problem = error
            continue
        return Fit(card.name, device, num, memory)
    raise problem


def _shared(requirements: MemoryRequirements, num_cards: int) -> MemoryRequirements:
    return replace(
        requirements,
        weights=-(-requirements.weights // num_cards),
        block=-(-requirements.block // num_cards),
        state=-(-requirements.state // num_cards),
        drafts=-(-requirements.drafts // num_cards),
    )

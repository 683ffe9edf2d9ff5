"""The start of a worker's ranks: their shared resources and their connection."""

import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from services.worker.config.model_config import ModelConfig
from services.worker.expert_loads import has_experts
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.stage import Stage
from services.worker.machine.hardware import Memory, read_memory
from services.worker.models.registry import find_model
from services.worker.ranks.rank_group import HostsGroup, RankGroup
from shared.errors import ConfigError
from shared.link.address import ranks_path
from shared.settings.worker import WorkerConfig

NODE_BITS = 16  # of the number of a NUMA node

log = logging.getLogger(__name__)


def check_split(settings: WorkerConfig, config: ModelConfig | None) -> None:
    """Raises ConfigError, before anything is read, if ranks cannot share the model; ``config`` is
    None if transformers computes it."""
    if settings.num_ranks == 1:
        return
    if config is None:
        raise ConfigError(
            f"{settings.ranks_setting}: {settings.num_ranks} is for our own architectures;"
            " transformers computes this model"
        )
    parallel = _parallel(settings, None)
    parallel.stage.layers(config.num_hidden_layers)
    with torch.device("meta"):
        model = find_model(config.architectures)(config, parallel)
    if settings.enable_expert_parallel and not has_experts(model):
        raise ConfigError("enable-expert-parallel: the model has no experts")
    if settings.enable_expert_distribution_metrics and not has_experts(model):
        raise ConfigError("enable-expert-distribution-metrics: the model has no experts")


class Joined(NamedTuple):
    """``ranks`` are all ranks of the worker, which agree on the number of blocks; ``parallel`` is
    this rank's part of the model."""

    ranks: Parallel
    parallel: Parallel


def join_ranks(settings: WorkerConfig, device: torch.device) -> Joined:
    """Waits for the other ranks. Raises ConfigError."""
    rank, size = settings.rank, settings.num_ranks
    if size == 1:
        return Joined(ALONE, ALONE)
    group = _group(settings, device)
    log.info("rank %d of %d", rank, size)
    if settings.nnodes > 1:
        log.info("what ranks of %d hosts send each other is not encrypted", settings.nnodes)
    return Joined(Parallel(rank, size, group), _parallel(settings, group))


def _group(settings: WorkerConfig, device: torch.device) -> RankGroup | HostsGroup:
    rank, size = settings.rank, settings.num_ranks
    leader = settings.leader or settings.instance
    if settings.master_addr is None or settings.nnodes == 1:
        return RankGroup(ranks_path(settings.mesh_dir, leader), rank, size, device)
    if device.type != "cpu":
        raise ConfigError("nnodes: several hosts are supported on CPUs only; set device to cpu")
    return HostsGroup(settings.master_addr, settings.master_port + 1, leader, rank, size)


def _parallel(settings: WorkerConfig, group: RankGroup | HostsGroup | None) -> Parallel:
    """This rank's part; without a ``group`` for a model that is only laid out."""
    if settings.pipeline_parallel_size > 1:
        return replace(ALONE, stage=Stage(settings.rank, settings.pipeline_parallel_size, group))
    size, has_whole_experts = settings.tensor_parallel_size, settings.enable_expert_parallel
    return Parallel(settings.rank, size, group, has_whole_experts)


def share_of(
    memory: Memory, settings: WorkerConfig, ranks: Parallel, device: torch.device
) -> Memory:
    """A rank's part of ``memory``, which ranks on CPUs with the same NUMA node share, and, on the
    whole machine, all ranks of a host. All ranks read it before any rank begins to fill it."""
    whole = read_memory(device)
    node = 0 if settings.numa_node is None else settings.numa_node + 1
    num = ranks.num_alike(settings.node_rank << NODE_BITS | node)
    if device.type == "cuda":
        return memory
    num_ranks = len(settings.ranks_of_host)
    return Memory(
        min(memory.total // num, whole.total // num_ranks),
        min(memory.free // num, whole.free // num_ranks),
    )

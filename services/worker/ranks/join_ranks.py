"""The start of a worker's ranks: their shared resources and their connection."""

import ctypes
import logging
import secrets
from dataclasses import replace

import torch

from kernels.cpu.collectives import Collectives, collectives_bytes, forget_name, open_memory
from services.worker.config.model_config import ModelConfig
from services.worker.layers.experts import has_experts
from services.worker.layers.parallel import ALONE, Parallel
from services.worker.layers.stage import Stage
from services.worker.models.registry import find_model
from services.worker.ranks.connect_hosts import connect_hosts
from services.worker.ranks.rank_group import HostsGroup, RankGroup
from services.worker.startup.ranks import Joined
from shared.errors import ConfigError
from shared.link.address import ranks_path
from shared.settings.worker import WorkerConfig

log = logging.getLogger(__name__)


def check_split(settings: WorkerConfig, config: ModelConfig | None) -> None:
    """Raises ConfigError, before anything is read, if ranks cannot share the model; ``config`` is
    None if transformers computes it."""
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


def join_ranks(settings: WorkerConfig, device: torch.device) -> Joined:
    """Waits for the other ranks. Raises ConfigError."""
    rank, size = settings.rank, settings.num_ranks
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


def meet_natively(parallel: Parallel, settings: WorkerConfig, library: ctypes.CDLL) -> Parallel:
    """The ranks of a host share memory, and its first rank adds the other hosts' parts. Raises
    ConfigError if there is too little memory."""
    if parallel.size == 1:
        return parallel
    rank, size, of_host = parallel.rank, parallel.size, settings.ranks_of_host
    is_first = rank == of_host.start
    token = parallel.first(torch.tensor([secrets.randbits(62)]))
    name = f"shoal-{int(token):x}-{settings.node_rank}"
    num_bytes = collectives_bytes(library, size)
    try:
        if is_first:
            memory = open_memory(name, num_bytes, creates=True)
        parallel.least(0)  # it is there
        if not is_first:
            memory = open_memory(name, num_bytes, creates=False)
        parallel.least(0)  # all have opened it
    except OSError as error:
        raise ConfigError(
            f"tensor-parallel-size: {len(of_host)} ranks share {num_bytes >> 20} MiB of /dev/shm:"
            f" {error.strerror}"
        ) from None
    finally:
        if is_first:
            forget_name(name)
    others = connect_hosts(parallel, settings)
    return replace(parallel, group=Collectives(library, memory, rank, size, of_host, others))

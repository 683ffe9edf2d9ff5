"""Each rank's part of the machine, and the settings that its process starts with."""

import os
from pathlib import Path

import torch

from shared.errors import ConfigError
from shared.link.address import rank_instance
from shared.process.cores import num_cores, numa_nodes
from shared.process.placement import place
from shared.settings.environment import PREFIX, SUPERVISOR_FD, with_settings
from shared.settings.worker import WorkerConfig
from shared.wire.messages import ServiceName

SERVICE: ServiceName = "worker"
NOT_PASSED_ON = {"config", "admin_port", "instance", "scheduler_address"}
LOADING_SILENCE_S = 60.0  # loading may hold the interpreter for much longer than steps do


def role_of(leader: str) -> str:
    """The role of the socket that the first rank has for the others."""
    return f"{leader}.ranks"


def with_share(config: WorkerConfig) -> WorkerConfig:
    """Returns the settings of the first rank of this host, with its share of cores and NUMA nodes.
    Raises ConfigError if there are fewer cores than ranks."""
    share = shares_of(config)[0]
    threads, node = (share.get(f"{PREFIX}{name}") for name in ("NUM_THREADS", "NUMA_NODE"))
    changes = {
        "num_threads": config.num_threads if threads is None else int(threads),
        "numa_node": config.numa_node if node is None else int(node),
        "gpu_claims": _claims(config),
        "rank": config.ranks_of_host.start,
    }
    return config.model_copy(update=changes)


def environment_of(
    config: WorkerConfig, rank: int, share: dict[str, str], supervisor: int
) -> dict[str, str]:
    """Returns that of the process of ``rank``, which ends when the descriptor ``supervisor``
    closes."""
    inherited = {
        name: text
        for name, text in os.environ.items()
        if name not in {f"{PREFIX}{each.upper()}" for each in NOT_PASSED_ON}
    }
    given = with_settings(inherited, config, config.model_fields_set - NOT_PASSED_ON)
    return {
        **given,
        **share,
        f"{PREFIX}GPU_CLAIMS": str(_claims(config)),
        f"{PREFIX}MESH_DIR": str(config.mesh_dir),
        f"{PREFIX}INSTANCE": rank_instance(config.instance, rank),
        f"{PREFIX}RANK": str(rank),
        f"{PREFIX}LEADER": config.instance,
        SUPERVISOR_FD: str(supervisor),
    }


def _claims(config: WorkerConfig) -> Path | None:
    """Ranks take a GPU each."""
    if config.num_ranks == 1 or config.gpu_claims is not None:
        return config.gpu_claims
    return config.mesh_dir / "gpus"


def shares_of(config: WorkerConfig) -> list[dict[str, str]]:
    """Returns the settings of each rank of this host, as variables: its threads and its NUMA node.
    Raises ConfigError if there are fewer cores than ranks."""
    size = len(config.ranks_of_host)
    if size == 1:
        return [{}]
    all_nodes = numa_nodes()
    own = [node for node in all_nodes if node.number == config.numa_node]
    available = len(own[0].cores) if own else num_cores()
    if size > available:
        raise ConfigError(
            f"{config.ranks_setting}: {size} ranks, and {available} cores: they would wait for each"
            " other"
        )
    nodes = all_nodes if config.numa_node is None else []
    num_gpus = 0 if config.device == "cpu" else torch.cuda.device_count()
    return place(size, num_gpus, nodes, config.num_threads or available)

from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import CliSuppress

from shared.settings.base import TCP_SETTINGS
from shared.settings.fields import Addresses, NumWorkers
from shared.settings.gateway import GatewayConfig
from shared.settings.scheduler import SchedulerConfig
from shared.settings.tokenizer import TokenizerConfig
from shared.settings.worker import RANK_SETTINGS, WorkerConfig

# Settings that differ per process, so that one value for a whole mesh is a mistake.
SETTINGS_OF_ONE_SERVICE = {
    *("instance", "admin_host", "admin_port"),
    *RANK_SETTINGS,
    *TCP_SETTINGS,
}


class ServeConfig(GatewayConfig, TokenizerConfig, SchedulerConfig, WorkerConfig):
    """Serves a model from a mesh of processes on this machine."""

    gateways: int = Field(1, ge=1, le=64, description="gateways, which share the port")
    tokenizers: int = Field(1, ge=1, le=64, description="tokenizers, which share the requests")
    schedulers: int = Field(
        2,
        ge=1,
        le=64,
        description="schedulers, each with its own workers; one without workers may stand by",
    )
    workers: NumWorkers = Field(
        1,
        description="workers, each with the whole model; auto: one per GPU, else one per NUMA node",
    )

    liveness_timeout_s: float = Field(
        10.0,
        gt=0,
        description="seconds without an answer after which a service is killed and restarted;"
        " six times as long during its start",
    )

    instance: CliSuppress[str] = ""
    admin_host: CliSuppress[str] = ""
    admin_port: CliSuppress[int | None] = None
    listen_address: CliSuppress[str | None] = None
    tokenizer_address: CliSuppress[Addresses] = Field([])
    scheduler_address: CliSuppress[Addresses] = Field([])
    rank: CliSuppress[int] = 0
    leader: CliSuppress[str] = ""

    @model_validator(mode="after")
    def _check_uds(self) -> Self:
        if self.uds is not None and self.gateways > 1:
            raise ValueError(f"uds: {self.gateways} gateways cannot share a socket; only one can")
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        for name in sorted(self.model_fields_set & SETTINGS_OF_ONE_SERVICE):
            raise ValueError(f"{name.replace('_', '-')} is a setting of one service alone")
        for name in sorted(self.model_fields_set & {"keys", "insecure_tcp"}):
            if self.nnodes == 1:
                text = "is a setting of one service alone, and of serve with nnodes"
                raise ValueError(f"{name.replace('_', '-')} {text}")
        if self.worker_role == "encoder":
            raise ValueError("worker-role: encoder: is for `shoal worker`, beside other workers")
        if self.nnodes > 1 and self.workers != 1:
            raise ValueError(f"workers: {self.workers}: with nnodes a host has ranks of one worker")
        return self

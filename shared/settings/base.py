"""The base class of all settings; pydantic-settings merges and checks them."""

import os
import secrets
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from shared.settings.fields import ApiKey
from shared.wire.messages import INSTANCE

TCP_SETTINGS = (
    *("listen_address", "tokenizer_address", "scheduler_address"),
    *("kv_transfer_address", "encoder_address"),
)
KEYS_OR_NOT = (
    "keys (a folder that `shoal keys` wrote), or insecure-tcp in a network that nobody else can"
    " reach"
)


class Settings(BaseSettings):
    """The settings of every service."""

    model_config = SettingsConfigDict(
        env_prefix="SHOAL_",
        frozen=True,
        extra="ignore",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
        protected_namespaces=(),
    )

    config: Path | None = Field(None, description="YAML file with any of these settings")
    mesh_dir: Path = Field(
        Path("/tmp") / f"shoal-{os.getuid()}" / "default",
        description="0700 directory of the mesh's sockets on this machine",
    )
    instance: str = Field(
        default_factory=lambda: secrets.token_hex(4),
        pattern=f"^{INSTANCE}$",
        description="name of this process in logs and in its sockets' paths",
    )
    admin_host: str = Field("127.0.0.1", description="address of the admin port")
    admin_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="tcp admin port (none: a unix socket in the mesh directory)",
    )
    admin_token: ApiKey | None = Field(
        None, description="token for requests to the admin port that change state"
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe lines that are logged"
    )
    log_format: Literal["text", "json"] = Field(
        "text", description="text, or json: one object a line"
    )
    log_requests: bool = Field(
        False, description="log a line for each request in each service when it ends"
    )
    drain_timeout_s: float = Field(30.0, ge=0, description="seconds to end open work after SIGTERM")
    keys: Path | None = Field(
        None,
        description="folder with the mesh's tcp keys, written by `shoal keys`; under serve for"
        " nnodes only",
    )
    insecure_tcp: bool = Field(
        False,
        description="allow tcp without keys: anyone who reaches a port can read and forge"
        " traffic; under serve for nnodes only",
    )

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.keys is None and not self.insecure_tcp:
            for name in TCP_SETTINGS:
                if getattr(self, name, None):
                    raise ValueError(f"{name.replace('_', '-')} needs {KEYS_OR_NOT}")
        return self

    def describe(self) -> str:
        """All settings with a value, in one line for the start-up log."""
        settings = [(name.replace("_", "-"), value) for name, value in self if value is not None]
        return " ".join(f"{name}={value}" for name, value in settings)

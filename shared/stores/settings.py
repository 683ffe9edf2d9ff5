"""Settings of the stores of KV blocks."""

from pathlib import Path

from pydantic import Field

from shared.settings.base import Settings


class StoreSettings(Settings):
    """Of a worker."""

    kv_offloading_size: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="on a CPU: GiB of a store for blocks of the KV cache that outlives the worker;"
        " 0: none",
    )
    kv_offloading_dir: Path | None = Field(
        None,
        description="folder of the stores of kv-offloading-size, of this user alone; memory if it"
        " is on tmpfs (default: /dev/shm/shoal-UID)",
    )

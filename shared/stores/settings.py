"""Settings of the stores of KV blocks."""

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from shared.settings.base import Settings


class StoreSettings(Settings):
    """Of a worker."""

    kv_offloading_size: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="GiB of a store for blocks of the KV cache that outlives the worker; 0: none",
    )
    kv_offloading_dir: Path | None = Field(
        None,
        description="folder of the stores of kv-offloading-size, of this user alone; memory if it"
        " is on tmpfs (default: /dev/shm/shoal-UID)",
    )
    kv_disk_size: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="GiB of a second store, in kv-disk-dir, for blocks that kv-offloading-size has"
        " no more room for; 0: none",
    )
    kv_disk_dir: Path | None = Field(
        None, description="folder of the stores of kv-disk-size, of this user alone, on a disk"
    )

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        if not self.kv_disk_size:
            return self
        if self.kv_disk_dir is None:
            raise ValueError(f"kv-disk-size: {self.kv_disk_size:g} GiB need a kv-disk-dir")
        if not self.kv_offloading_size:
            raise ValueError(
                f"kv-disk-size: {self.kv_disk_size:g} GiB need a store in memory above"
                " (kv-offloading-size)"
            )
        return self

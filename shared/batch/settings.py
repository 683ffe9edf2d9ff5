"""Settings of files and batches."""

from pathlib import Path

from pydantic import Field

from shared.settings.base import Settings
from shared.wire.messages import MAX_PRIORITY


class BatchSettings(Settings):
    """Of a gateway."""

    batch_dir: Path | None = Field(
        None,
        description="folder of /v1/files and /v1/batches, shared by gateways; without it they"
        " are refused",
    )
    max_file_bytes: int = Field(
        200 << 20, gt=0, description="largest file that clients may upload; above it 413"
    )
    max_batch_requests: int = Field(
        50_000, gt=0, description="most requests in a batch; one with more fails"
    )
    max_batches_per_key: int = Field(
        100,
        gt=0,
        description="open batches of an API key, or of a server without keys; above it 429",
    )
    max_open_batch_requests: int = Field(
        16, gt=0, description="open requests of all batches of a gateway"
    )
    batch_priority: int = Field(
        100,
        ge=0,
        le=MAX_PRIORITY,
        description="priority of batch requests; higher is later, and is preempted",
    )

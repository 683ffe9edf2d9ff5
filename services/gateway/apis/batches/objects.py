"""OpenAI's objects of files and batches, as they lie in the folder and as clients get them."""

from typing import Literal

from msgspec import Struct

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})


class FileObject(Struct, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: str = "processed"


class StoredFile(Struct):
    """``owner`` is the ``key_id`` of the API key that it came with."""

    owner: str
    file: FileObject


class DeletedFile(Struct):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class BatchError(Struct):
    code: str
    message: str
    param: str | None = None
    line: int | None = None


class BatchErrors(Struct):
    data: list[BatchError]
    object: Literal["list"] = "list"


class RequestCounts(Struct):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchObject(Struct, kw_only=True):
    """Times are seconds since 1970."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED


class StoredBatch(Struct):
    """``num_lines`` are the lines of the input; the two files get their names before there is a
    result."""

    owner: str
    batch: BatchObject
    good_file_id: str
    bad_file_id: str
    num_lines: int = 0


class ObjectList(Struct):
    data: list[FileObject] | list[BatchObject]
    has_more: bool
    first_id: str | None
    last_id: str | None
    object: Literal["list"] = "list"

"""Divides the GPUs of a machine among its workers: each GPU that is taken has a locked file."""

import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GpuClaim:
    """``lock`` is a descriptor that we never close: the kernel closes it, and so frees the GPU,
    when the process ends in any way."""

    index: int
    lock: int


def claim_gpu(folder: Path, gpu_ids: Sequence[str]) -> GpuClaim:
    """The first of ``gpu_ids`` that no other claim on ``folder`` holds. Raises ConfigError if all
    are taken, and for a folder that cannot be written to."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for index, gpu_id in enumerate(gpu_ids):
            lock = _try_lock(folder / f"{gpu_id}.lock")
            if lock is not None:
                return GpuClaim(index, lock)
    except OSError as error:
        raise ConfigError(f"gpu-claims: {folder}: {error.strerror}") from None
    raise ConfigError(
        f"gpu-claims: all {len(gpu_ids)} GPUs are taken by other workers (folder {folder})"
    )


def _try_lock(path: Path) -> int | None:
    """The descriptor that holds the lock, or None if another process does. A file stays when it is
    free again: to remove it would let two processes hold locks of one name."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor

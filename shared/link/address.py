"""Paths of the sockets of a mesh on one machine."""

import os
import stat
from pathlib import Path
from typing import Literal

from shared.errors import ConfigError
from shared.wire.messages import ServiceName

MAX_PATH_BYTES = 107
MAX_LEADER_CHARS = 25  # so that a rank's name is no longer than an instance may be


def socket_path(directory: Path, service: ServiceName, instance: str, role: str = "") -> Path:
    """``directory/<service>[-role]-<instance>.sock``; ``role`` distinguishes two sockets of one
    service."""
    return directory / f"{service}{role and '.' + role}-{instance}.sock"


def find_sockets(directory: Path, service: ServiceName, role: str = "") -> set[Path]:
    return set(directory.glob(f"{service}{role and '.' + role}-*.sock"))


def ipc_address(path: Path) -> str:
    """``path`` as a ZeroMQ address. Raises ConfigError as ``checked`` does."""
    return f"ipc://{checked(path)}"


def checked(path: Path) -> Path:
    """Raises ConfigError above the kernel's limit for a socket's path."""
    size = len(bytes(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"mesh-dir: the socket path {path} has {size} bytes; the limit is {MAX_PATH_BYTES}"
        )
    return path


def admin_path(directory: Path, service: ServiceName, instance: str) -> Path:
    return directory / f"admin.{service}-{instance}.sock"


def ranks_path(directory: Path, leader: str) -> Path:
    """The file by which the ranks of a worker find each other as they start."""
    return directory / f"ranks-{leader}.store"


def rank_instance(leader: str, rank: int | Literal["*"]) -> str:
    """The name of a rank of a worker with the first rank ``leader``."""
    return f"{leader[:MAX_LEADER_CHARS]}.rank{rank}"


def make_private_directory(directory: Path) -> None:
    """Creates it, 0700, or checks that no other user can enter or replace it.

    Another user there could read prompts and answer for the mesh. Raises ConfigError.
    """
    try:
        _make(directory)
        directory = directory.resolve()
        _check_private(directory)
        for parent in directory.parents:
            _check_parent(parent)
    except OSError as error:
        raise ConfigError(f"mesh-dir: {directory}: {error.strerror}") from None


def _make(directory: Path) -> None:
    if not directory.exists():
        _make(directory.parent)
        directory.mkdir(mode=0o700, exist_ok=True)


def _check_private(directory: Path) -> None:
    status = directory.stat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"mesh-dir: {directory} must be a directory of ours that only we can enter;"
            f" it belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}"
        )


def _check_parent(directory: Path) -> None:
    status = directory.stat()
    is_open = status.st_mode & 0o022 and not status.st_mode & stat.S_ISVTX
    if is_open or status.st_uid not in (0, os.getuid()):
        raise ConfigError(f"mesh-dir: other users can replace the contents of {directory}")

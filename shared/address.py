"""Where the sockets of a mesh on one machine lie."""

from pathlib import Path

from shared.errors import ConfigError
from shared.messages import ServiceName

MAX_PATH_BYTES = 107


def socket_path(directory: Path, service: ServiceName, instance: str, role: str = "") -> Path:
    """``directory/<service>[-role]-<instance>.sock``; ``role`` tells two sockets of one service
    apart."""
    return directory / f"{service}{role and '.' + role}-{instance}.sock"


def find_sockets(directory: Path, service: ServiceName, role: str = "") -> set[Path]:
    return set(directory.glob(f"{service}{role and '.' + role}-*.sock"))


def ipc_address(path: Path) -> str:
    """``path`` as a ZeroMQ address. Raises ConfigError above the kernel's limit for a socket's
    path."""
    size = len(bytes(path))
    if size > MAX_PATH_BYTES:
        raise ConfigError(
            f"mesh-dir: the socket path {path} has {size} bytes; the limit is {MAX_PATH_BYTES}"
        )
    return f"ipc://{path}"


def admin_path(directory: Path, service: ServiceName, instance: str) -> Path:
    return directory / f"admin.{service}-{instance}.sock"

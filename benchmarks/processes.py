"""Process facts from /proc."""

from collections.abc import Iterator
from pathlib import Path


def services_of(mesh_dir: Path) -> dict[str, int]:
    """Process ids by service, of live processes ``shoal serve`` runs in ``mesh_dir``."""
    return dict(_processes_of(mesh_dir))


def workers_of(mesh_dir: Path) -> list[int]:
    """Process ids of all ranks of the workers it runs there."""
    return sorted(pid for service, pid in _processes_of(mesh_dir) if service == "worker")


def _processes_of(mesh_dir: Path) -> Iterator[tuple[str, int]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            pid = int(entry.name)
            modules = [word for word in _command_line(pid) if word.startswith("services.")]
            if modules and f"SHOAL_MESH_DIR={mesh_dir}/".encode() in _environment(pid):
                yield modules[0].removeprefix("services."), pid


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def own_bytes(pid: int) -> int:
    """Anonymous memory of a process: mapped files depend on the kernel's page cache."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("Pss_Anon:")]
    return int(line.split()[1]) << 10


def num_descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def _environment(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""

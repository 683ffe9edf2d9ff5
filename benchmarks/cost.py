"""What a number of messages cost the processes that exchanged them."""

import resource
from pathlib import Path

Figures = dict[str, float]


def cpu_s() -> float:
    """Seconds that all threads of this process have computed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tell_cpu() -> None:
    """Prints ``cpu_s`` for the process that started this one."""
    print(cpu_s(), flush=True)


def forget_peak(pid: int) -> None:
    """From now on the process's peak is that of what follows."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The most memory that the process has held at once, of pages that were resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def figures(num: int, num_bytes: int, seconds: float, cpu_s: float, other_cpu_s: float) -> Figures:
    """For ``num`` messages of ``num_bytes``."""
    return {
        "messages/s": num / seconds,
        "MB/s": num * num_bytes / seconds / 1e6,
        "sender CPU us/message": cpu_s / num * 1e6,
        "receiver CPU us/message": other_cpu_s / num * 1e6,
    }

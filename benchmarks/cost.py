"""CPU time and memory of processes that exchange messages."""

import resource
from pathlib import Path

Figures = dict[str, float]


def cpu_s() -> float:
    """CPU seconds of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tell_cpu() -> None:
    """Prints ``cpu_s`` for the parent process."""
    print(cpu_s(), flush=True)


def forget_peak(pid: int) -> None:
    """Resets the peak of the process's resident memory."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pid: int) -> int:
    """The process's peak resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def figures(num: int, num_bytes: int, seconds: float, cpu_s: float, other_cpu_s: float) -> Figures:
    """Costs per message, for ``num`` messages of ``num_bytes`` in total."""
    return {
        "messages/s": num / seconds,
        "MB/s": num * num_bytes / seconds / 1e6,
        "sender CPU us/message": cpu_s / num * 1e6,
        "receiver CPU us/message": other_cpu_s / num * 1e6,
    }

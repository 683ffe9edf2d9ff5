"""What a number of messages cost the two processes that exchanged them."""

import resource

Figures = dict[str, float]


def cpu_s() -> float:
    """Seconds that all threads of this process have computed."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def tell_cpu() -> None:
    """Prints ``cpu_s`` for the process that started this one."""
    print(cpu_s(), flush=True)


def figures(num: int, num_bytes: int, seconds: float, cpu_s: float, other_cpu_s: float) -> Figures:
    """For ``num`` messages of ``num_bytes``."""
    return {
        "messages/s": num / seconds,
        "MB/s": num * num_bytes / seconds / 1e6,
        "sender CPU us/message": cpu_s / num * 1e6,
        "receiver CPU us/message": other_cpu_s / num * 1e6,
    }

"""The state of a mesh as a table."""

from typing import Any

from rich.table import Table
from rich.text import Text

STYLES = {
    "ready": "green",
    "starting": "yellow",
    "draining": "yellow",
    "suspect": "red",
    "lost": "red",
}
MIB = 1 << 20


def mesh_table(services: list[dict[str, Any]], cpu: dict[tuple[str, str], float]) -> Table:
    """``services`` as ``/v1/mesh`` lists them; ``cpu`` are their used cores."""
    table = Table(box=None, pad_edge=False)
    table.add_column("SERVICE", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for name in ("UP", "MEMORY", "CORES"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("LOAD")
    for service in services:
        key = service["role"], service["instance"]
        memory = service["stats"].get("memory_bytes")
        table.add_row(
            Text(" ".join(key)),
            Text(service["state"], STYLES.get(service["state"], "")),
            "" if service["uptime_s"] is None else duration(service["uptime_s"]),
            "" if memory is None else f"{memory / MIB:.0f} MiB",
            f"{cpu[key]:.1f}" if key in cpu else "",
            Text(load_of(service)),
        )
    return table


def load_of(service: dict[str, Any]) -> str:
    """Load and slow links of a service; the reason if it is not ready."""
    stats, parts = service["stats"], []
    if service["reason"]:
        parts.append(service["reason"])
    match service["role"]:
        case "gateway":
            parts += _counted(stats, "open_requests", "open requests")
        case "tokenizer":
            parts += _counted(stats, "open_prompts", "open prompts")
        case "scheduler":
            parts += _counted(stats, "running", "running")
            parts += _counted(stats, "waiting", "waiting")
        case _:
            parts += _worker_load(stats)
    trips = [each["round_trip_ms"] for each in service["links"]]
    known = [each for each in trips if each is not None]
    if known:
        parts.append(f"link {max(known):.1f} ms")
    return ", ".join(parts)


def _counted(stats: dict[str, Any], name: str, text: str) -> list[str]:
    return [f"{stats[name]} {text}"] if name in stats else []


def _worker_load(stats: dict[str, Any]) -> list[str]:
    parts = []
    if stats.get("slots"):
        parts.append(f"{stats['slots_used']}/{stats['slots']} slots")
    if stats.get("kv_blocks"):
        parts.append(f"KV {stats['kv_blocks_used'] / stats['kv_blocks']:.0%}")
    if stats.get("tokens_per_s"):
        parts.append(f"{stats['tokens_per_s']:.0f} tokens/s")
        parts.append(f"{stats['step_ms']:.1f} ms a step")
    if stats.get("drafted"):
        parts.append(f"{stats['accepted'] / stats['drafted']:.0%} of drafts")
    return parts


def duration(seconds: float) -> str:
    """The two largest units: 3m12s, 4h05m, 2d03h."""
    whole = int(seconds)
    for unit, size, small, part in (("d", 86400, "h", 3600), ("h", 3600, "m", 60)):
        if whole >= size:
            return f"{whole // size}{unit}{whole % size // part:02}{small}"
    return f"{whole // 60}m{whole % 60:02}s" if whole >= 60 else f"{whole}s"

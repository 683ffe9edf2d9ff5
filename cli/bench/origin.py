"""The origin and the destination of a benchmark's result."""

import os
import platform
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from cli.processor import cpu_features, cpu_field
from shared.errors import ConfigError
from shared.version import VERSION

FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def origin(benchmark: str, arguments: list[str], packages: Sequence[str]) -> dict[str, Any]:
    """For JSON. ``arguments`` are those of the command line."""
    command = shlex.join(["shoal", "bench", benchmark, *_without_key(arguments)])
    return described(benchmark, command, packages)


def described(benchmark: str, command: str, packages: Sequence[str]) -> dict[str, Any]:
    """The context of a result: machine, versions of installed ``packages``, date, command."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": _machine(),
        "versions": {"python": platform.python_version(), "shoal": VERSION} | _versions(packages),
    }


def write(report: dict[str, Any], path: Path) -> None:
    """Raises ConfigError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    except OSError as error:
        raise ConfigError(f"--json: cannot write {path}: {error.strerror}") from None


def _without_key(arguments: list[str]) -> list[str]:
    words = [
        "***" if before == "--api-key" else word
        for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    return ["--api-key=***" if word.startswith("--api-key=") else word for word in words]


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _machine() -> dict[str, Any]:
    return {
        "processor": cpu_field("model name") or "unknown",
        "family and model": f"{cpu_field('cpu family')}/{cpu_field('model')}",
        "features": cpu_features(FEATURES),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
    }

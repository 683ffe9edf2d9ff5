"""The card and what runs on it, beside what all benchmarks tell of a machine."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from cli.bench.origin import described

PACKAGES = ("shoal", "torch", "triton", "transformers", "pyzmq", "msgspec", "numpy", "aiohttp")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def describe(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    command = " ".join(["python -m benchmarks.gpu.check", *arguments])
    packages = [name for name in PACKAGES if _is_installed(name)]
    return described("gpu", command, packages) | {"card": _card(device)}


def slug(told: dict[str, Any]) -> str:
    """Of the card's name, for a file's."""
    return re.sub("[^a-z0-9]+", "-", told["card"]["name"].lower()).strip("-")


def _card(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "GB": round(properties.total_memory / 1e9, 1),
        "processors": properties.multi_processor_count,
        "L2 MB": round(getattr(properties, "L2_cache_size", 0) / 1e6, 1),
        "driver": _driver(),
        "CUDA": torch.version.cuda,
    }


def _driver() -> str:
    try:
        told = subprocess.run(DRIVER, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no driver's version: {error}", file=sys.stderr)
        return "unknown"
    return told.stdout.strip()


def _is_installed(package: str) -> bool:
    """A checkout that is run where it lies is not."""
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True

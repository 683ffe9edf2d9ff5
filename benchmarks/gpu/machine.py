"""The GPU and its software, added to the facts all benchmarks record."""

import os
import re
import subprocess
import sys
from typing import Any

import torch

from benchmarks.gpu.precision import OF_TORCH
from cli.bench.origin import described

PACKAGES = ("torch", "triton", "transformers", "pyzmq", "msgspec", "numpy", "aiohttp")
DRIVER = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
PREFIXES = (
    "CUDA_",
    "CUBLAS_",
    "NVIDIA_",
    "PYTORCH_",
    "TORCH_",
    "TRITON_",
)  # relevant environment variables


def describe(device: torch.device, arguments: list[str]) -> dict[str, Any]:
    command = " ".join(["python -m benchmarks.gpu.check", *arguments])
    facts = described("gpu", command, PACKAGES) | {"card": _card(device)}
    return facts | {"torch's precision": OF_TORCH, "environment": _environment()}


def slug(facts: dict[str, Any]) -> str:
    """The GPU's name, for a file name."""
    return re.sub("[^a-z0-9]+", "-", facts["card"]["name"].lower()).strip("-")


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


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(PREFIXES)}


def _driver() -> str:
    try:
        facts = subprocess.run(DRIVER, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no driver's version: {error}", file=sys.stderr)
        return "unknown"
    return facts.stdout.strip()

"""``shoal collect-env``: facts of a machine for a bug report, without secrets."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from cli.command import run
from cli.exit_codes import OK
from cli.flags import Parser
from cli.processor import cpu_features, cpu_field
from kernels.cpu.build import VARIANTS
from kernels.cpu.library import find_variant, variants
from shared.process.cores import num_cores, numa_nodes, read_text
from shared.settings.environment import PREFIX
from shared.settings.serve import ServeConfig
from shared.settings.sources import SECRET_SETTINGS
from shared.version import VERSION

PACKAGES = (
    *("torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance"),
    *("numpy", "pyzmq", "msgspec", "uvloop", "aiohttp", "pydantic", "huggingface-hub"),
)
CPU_FLAGS = sorted(set[str]().union(*(each.flags for each in VARIANTS.values())))
GPU_QUERY = "--query-gpu=name,memory.total,driver_version,compute_cap"
GPU_TIMEOUT_S = 10.0
OTHER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_CACHE", "OMP_NUM_THREADS")


def main(arguments: list[str]) -> int:
    return run("collect-env", lambda: _collect(arguments))


def _collect(arguments: list[str]) -> int:
    parser = Parser(
        "shoal collect-env",
        description="Prints versions, CPU, memory, GPUs and settings, without keys or tokens.",
        epilog="Exit codes: 0; 2: a wrong flag.",
    )
    parser.add_argument("--json", action="store_true", help="prints one object")
    options = parser.parse_args(arguments)
    found = collect()
    print(json.dumps(found) if options.json else _as_text(found))
    return OK


def collect() -> dict[str, Any]:
    return {
        "shoal": VERSION,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "distribution": _distribution(),
        "packages": {name: version_of(name) for name in PACKAGES},
        "torch_cuda": _torch_cuda(),
        "cpu": {
            "model": cpu_field("model name"),
            "cores": os.cpu_count(),
            "usable_cores": num_cores(),
            "numa_nodes": len(numa_nodes()),
            "flags": cpu_features(CPU_FLAGS),
        },
        "native_code": {"chosen": find_variant(), "cpu_can_run": variants()},
        "memory_mib": {"total": _memory("MemTotal"), "available": _memory("MemAvailable")},
        "gpus": _gpus(),
        "settings": _settings(),
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    """The CUDA version of torch, read from one of its files, since an import would take seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = read_text(Path(spec.origin).parent / "version.py")
    match = re.search(r"^cuda\b[^=\n]*= '([^']+)'", text, re.MULTILINE)
    return match[1] if match else None


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return ""


def _memory(name: str) -> int:
    """Memory in MiB."""
    lines = read_text(Path("/proc/meminfo")).splitlines()
    found = next((line.split()[1] for line in lines if line.startswith(f"{name}:")), "0")
    return int(found) // 1024


def _gpus() -> list[dict[str, str]]:
    """GPUs as nvidia-smi names them; empty without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        ended = subprocess.run(
            ["nvidia-smi", GPU_QUERY, "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=GPU_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        print(f"shoal collect-env: nvidia-smi: {error}", file=sys.stderr)
        return []
    names = ("name", "memory", "driver", "compute_capability")
    rows = [line.split(", ") for line in ended.stdout.splitlines()]
    return [dict(zip(names, row, strict=False)) for row in rows]


def _settings() -> dict[str, str]:
    """Settings and other relevant variables of the environment. Unknown or secret ones are shown by
    name only."""
    known = {f"{PREFIX}{name}".upper() for name in ServeConfig.model_fields}
    secret = {f"{PREFIX}{name}".upper() for name in SECRET_SETTINGS}
    shown = (known - secret) | set(OTHER_VARIABLES)
    return {
        name: value if name.upper() in shown else "(not shown)"
        for name, value in sorted(os.environ.items())
        if name.upper().startswith(PREFIX) or name in OTHER_VARIABLES
    }


def _as_text(found: dict[str, Any]) -> str:
    return "\n".join(f"{name.replace('_', ' '):14} {_one(value)}" for name, value in found.items())


def _one(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".ljust(16).join(f"{name}: {_one(each)}" for name, each in value.items()) or "-"
    if isinstance(value, list):
        return ", ".join(map(_one, value)) or "-"
    return "-" if value is None else str(value)

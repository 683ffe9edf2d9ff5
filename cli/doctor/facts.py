"""The facts of a machine on which the start and the speed of a mesh depend."""

import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cli.collect_env import collect, version_of
from cli.models.found import weights_bytes
from cli.placement import num_gpus
from cli.run_directory import RunDirectory
from cli.serve import check_port
from cli.server import NoServerError, RefusedError, Server
from shared.errors import ConfigError
from shared.link.address import admin_path, checked
from shared.model_folder import TOKENIZER_FILE, find_file, weight_files
from shared.model_location import locate_model
from shared.pooling import read_served_model
from shared.process.cores import read_text
from shared.settings.serve import ServeConfig
from shared.version import VERSION

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
SHARED_MEMORY = Path("/dev/shm")
LONGEST_RUN = "serve-12345678"  # the folder of a run in mesh-dir
LONGEST_INSTANCE = "63.99"
EXTRAS = ("gateway", "tokenizer", "worker")
REQUIREMENT = re.compile(r"(?P<package>[\w.-]+)[^;]*(;.*extra == ['\"](?P<extra>\w+)['\"])?")
TORCH_TIMEOUT_S = 120.0
SERVER_TIMEOUT_S = 2.0
DOCKER_TIMEOUT_S = 10.0
ENGINE_VERSION = ("docker", "version", "--format", "{{.Server.Version}}")
COMPOSE_VERSION = ("docker", "compose", "version", "--short")


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    free_bytes: int


@dataclass(frozen=True, slots=True)
class Devices:
    """A worker's view; ``error`` is torch's."""

    torch: str = ""
    cuda: str | None = None
    dtype: str = ""
    free_bytes: int = 0
    gpus: tuple[Gpu, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """``environment`` is the object of ``shoal collect-env``. A version of Docker is empty without
    an answer. Texts of errors are empty without one. ``serves_already``: a server of this version
    is on the port."""

    environment: dict[str, Any]
    devices: Devices
    num_gpu_files: int
    missing_packages: tuple[str, ...] = ()
    shared_memory_bytes: int | None = None
    huge_pages: str = ""
    max_open_files: int = 0
    port_error: str = ""
    serves_already: bool = False
    mesh_dir_error: str = ""
    model_error: str = ""
    weights_bytes: int = 0
    engine: str = ""
    compose: str = ""
    config: ServeConfig = field(default_factory=ServeConfig)


def gather(config: ServeConfig) -> Facts:
    """Takes seconds: a child process imports torch."""
    model_error, weights_bytes = _model(config)
    port_error = _error_of(check_port, config)
    return Facts(
        environment=collect(),
        devices=_devices(),
        num_gpu_files=num_gpus(),
        missing_packages=tuple(name for name in _required_packages() if version_of(name) is None),
        shared_memory_bytes=_shared_memory_bytes(),
        huge_pages=_chosen(read_text(HUGE_PAGES)),
        max_open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        port_error=port_error,
        serves_already=bool(port_error) and serves(config),
        mesh_dir_error=_error_of(_check_mesh_dir, config),
        model_error=model_error,
        weights_bytes=weights_bytes,
        engine=_output_of(*ENGINE_VERSION),
        compose=_output_of(*COMPOSE_VERSION),
        config=config,
    )


def _devices() -> Devices:
    command = [sys.executable, "-P", "-m", "cli.doctor.device"]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return Devices(error=f"no answer within {TORCH_TIMEOUT_S:g} s")
    if ended.returncode:
        return Devices(error=(ended.stderr.strip().splitlines() or ["it crashed"])[-1])
    found = json.loads(ended.stdout.splitlines()[-1])
    gpus = (each | {"capability": tuple(each["capability"])} for each in found.pop("gpus"))
    return Devices(**found, gpus=tuple(Gpu(**each) for each in gpus))


def _required_packages() -> Iterator[str]:
    """The packages of all services."""
    yield "shoal"
    if version_of("shoal") is None:
        return
    for text in importlib.metadata.requires("shoal") or []:
        found = REQUIREMENT.match(text)
        if found is not None and found["extra"] in (None, *EXTRAS):
            yield found["package"]


def _model(config: ServeConfig) -> tuple[str, int]:
    """The reason why a model cannot be loaded, and the bytes of its weights."""
    try:
        folder = locate_model(config.model).folder
        _check_files(folder, config)
        return "", weights_bytes(folder)
    except (ConfigError, OSError) as error:
        return str(error), 0


def _check_files(folder: Path, config: ServeConfig) -> None:
    """Of weights only the headers are read. Raises ConfigError."""
    read_served_model(folder, [], config.max_model_len, config.runner, config.pooler_config)
    find_file(folder, TOKENIZER_FILE)
    if config.load_format == "dummy" or importlib.util.find_spec("safetensors") is None:
        return
    from safetensors import SafetensorError, safe_open

    for file in weight_files(folder):
        try:
            if file.suffix == ".safetensors":
                with safe_open(file, framework="numpy"):
                    pass
        except SafetensorError as error:
            raise ConfigError(f"model: {file} is not a valid safetensors file: {error}") from None


def _shared_memory_bytes() -> int | None:
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return found.f_frsize * found.f_bavail


def _chosen(text: str) -> str:
    """The word in brackets: always [madvise] never."""
    match = re.search(r"\[(\w+)\]", text)
    return match[1] if match else ""


def serves(config: ServeConfig) -> bool:
    """True if a server of this version is on the port and answers without a key."""
    scheme = "http" if config.ssl_certfile is None else "https"
    server = Server(f"{scheme}://{config.host}:{config.port}", None, SERVER_TIMEOUT_S)
    try:
        return bool(server.get("/version") == {"version": VERSION})
    except (NoServerError, RefusedError):
        return False


def _check_mesh_dir(config: ServeConfig) -> None:
    """Raises ConfigError if the folder and the sockets of a run cannot be made there."""
    RunDirectory(config.mesh_dir).remove()
    checked(admin_path(config.mesh_dir / LONGEST_RUN, "scheduler", LONGEST_INSTANCE))


def _error_of(check: Any, config: ServeConfig) -> str:
    try:
        check(config)
    except ConfigError as error:
        return str(error)
    return ""


def _output_of(*command: str) -> str:
    """Empty for a command that is not there, fails or hangs."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=DOCKER_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return "" if ended.returncode else ended.stdout.strip()

"""Whole servers as processes: shoal and its peers."""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness.ports import free_port
from benchmarks.harness.ready import until_ready

READY_TIMEOUT_S = 600  # vLLM compiles for a minute
STOP_TIMEOUT_S = 60
KV_CACHE_GIB = 2  # enough for every point, and small compared with the weights
SHOAL = [sys.executable, "-c", "from cli.main import main; main()"]
ROOT = Path(__file__).parent.parent
LLAMA_SLOTS = 32
LLAMA_SLOT_TOKENS = 512


@dataclass(frozen=True)
class Server:
    """A command completed with host and port; ``environment`` is added to our own. ``folder`` is
    the working directory: the checkout, for one of ours."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path = ROOT


def checkout(*flags: str, name: str = "shoal", folder: Path = ROOT) -> Server:
    """``shoal serve`` from the code in ``folder``, whatever is installed, with one scheduler; its
    libraries may be in PYTHONPATH."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return Server(
        name, [*SHOAL, "serve", "--schedulers", "1", *flags], {"PYTHONPATH": path}, folder
    )


def shoal(model: Path, *flags: str, name: str = "shoal") -> Server:
    return checkout("--model", str(model), "--dtype", "bfloat16", *flags, name=name)


def vllm(python: Path, model: Path) -> Server:
    """``python`` is the interpreter of an environment with vLLM for this machine."""
    command = [str(python), "-m", "vllm.entrypoints.cli.main", "serve", str(model)]
    flags = ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--disable-uvicorn-access-log"]
    # By default vLLM leaves one core idle.
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return Server("vllm", command + flags, environment)


def llama(program: Path, gguf: Path) -> Server:
    """llama.cpp's ``llama-server``, with a slot for each stream."""
    num_cores = str(len(os.sched_getaffinity(0)))
    flags = ["--parallel", str(LLAMA_SLOTS), "--ctx-size", str(LLAMA_SLOTS * LLAMA_SLOT_TOKENS)]
    flags += ["--threads", num_cores, "--no-cache-prompt", "--cache-ram", "0"]
    return Server("llama.cpp", [str(program), "--model", str(gguf), *flags])


@asynccontextmanager
async def running(server: Server, lines: list[str] | None = None) -> AsyncIterator[str]:
    """The server's URL, once it is ready; ends it and all its processes at the end. Its log is
    added to ``lines``."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as name, (Path(name) / "log").open("w+b") as log:
        process = await asyncio.create_subprocess_exec(
            *(*server.command, "--host", "127.0.0.1", "--port", str(port)),
            stdout=log,
            stderr=asyncio.subprocess.STDOUT,
            env=os.environ | {"SHOAL_MESH_DIR": f"{name}/mesh"} | server.environment,
            cwd=server.folder,
            start_new_session=True,
        )
        try:
            await until_ready(url, process, Path(log.name).read_text, timeout_s=READY_TIMEOUT_S)
            yield url
        finally:
            await _stop(process)
            if lines is not None:
                lines += Path(log.name).read_text(errors="replace").splitlines()


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()

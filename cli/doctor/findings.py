"""From the facts of a machine to findings. Pure."""

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from cli.doctor.facts import Facts

State = Literal["ok", "note", "problem"]

MIB = 1 << 20
MIN_CAPABILITY = (8, 0)
MIN_ENGINE = (20, 10)
MIN_COMPOSE = (2, 26)
SHARED_BYTES_PER_RANK = 2 * MIB
SPARE_FILES = 256  # of a gateway, apart from its clients
PLACES_OF_TMP = "a short path on a local disk, for example --mesh-dir /tmp/shoal-mine"


class Finding(NamedTuple):
    """``note``: the mesh starts, but could do better. ``problem``: it does not start. ``fix`` is a
    command, a setting or empty."""

    topic: str
    state: State
    text: str
    fix: str = ""


def findings(facts: Facts) -> list[Finding]:
    """In the order of a start: software, processor, memory, system, devices, model."""
    return [check(facts) for check in CHECKS]


def _software(facts: Facts) -> Finding:
    found = facts.environment
    text = f"Shoal {found['shoal']}, Python {found['python']}, {found['system']}"
    if not found["system"].startswith("Linux"):
        return Finding("software", "problem", f"{text}: Shoal needs Linux", "a virtual machine")
    return Finding("software", "ok", text)


def _packages(facts: Facts) -> Finding:
    missing = facts.missing_packages
    if missing:
        fix = "in the checkout: make setup, or pip install '.[gateway,tokenizer,worker]'"
        return Finding("packages", "problem", f"not installed: {', '.join(missing)}", fix)
    if facts.devices.error:
        text = f"torch cannot be imported: {facts.devices.error}"
        return Finding("packages", "problem", text, "pip install --force-reinstall torch")
    cuda = f"CUDA {facts.devices.cuda}" if facts.devices.cuda else "without CUDA"
    return Finding("packages", "ok", f"all installed; torch {facts.devices.torch}, {cuda}")


def _processor(facts: Facts) -> Finding:
    found, native = facts.environment["cpu"], facts.environment["native_code"]
    name = found["model"] or "unknown processor"
    chosen, possible = native["chosen"], native["cpu_can_run"]
    if not possible:
        text = f"{name}: no native code, which needs AVX2 on x86-64; torch's operators are slower"
        return Finding("processor", "ok" if _uses_gpus(facts) else "note", text)
    if chosen != possible[0]:
        built = f"only {chosen}" if chosen else "none"
        text = f"{name}: can run native code for {possible[0]}, built is {built}"
        return Finding("processor", "note", text, "install g++, then make setup")
    text = f"{name}: native code for {chosen}, {facts.devices.dtype or 'no torch'}"
    if "amx_tile" in found["flags"] and chosen != "amx":
        text = f"{text}; the kernel refuses AMX"
        return Finding(
            "processor", "note", text, "Linux 5.16 or newer, a container that allows AMX"
        )
    return Finding("processor", "ok", text)


def _cores(facts: Facts) -> Finding:
    cpu = facts.environment["cpu"]
    usable, num_nodes = cpu["usable_cores"], cpu["numa_nodes"]
    nodes = f", on {num_nodes} NUMA nodes" if num_nodes > 1 else ""
    text = f"{usable} of {cpu['cores']} usable{nodes}"
    if usable < 2:
        text = f"{text}: the services take turns with the computation"
        return Finding("cores", "note", text, "a larger CPU quota")
    if num_nodes > 1 and facts.config.workers == 1 and not _uses_gpus(facts):
        text = f"{text}: one worker waits for memory of other nodes"
        return Finding("cores", "note", text, "--workers auto")
    return Finding("cores", "ok", text)


def _memory(facts: Facts) -> Finding:
    free = facts.devices.free_bytes // MIB
    total = facts.environment["memory_mib"]["total"]
    if facts.devices.error:
        return Finding("memory", "note", f"{total:,} MiB; the free part is unknown without torch")
    return Finding("memory", "ok", f"{free:,} MiB free for a worker, of {total:,} MiB")


def _shared_memory(facts: Facts) -> Finding:
    room, num_ranks = facts.shared_memory_bytes, len(facts.config.ranks_of_host)
    needed = SHARED_BYTES_PER_RANK * num_ranks if num_ranks > 1 else 0
    if room is None:
        text = "no /dev/shm; ranks of a worker need it"
        return Finding("shared memory", "problem" if needed else "ok", text, "--shm-size of docker")
    text = f"{room // MIB:,} MiB free in /dev/shm"
    if room < needed:
        text = f"{text}; {num_ranks} ranks need {needed // MIB} MiB"
        return Finding("shared memory", "problem", text, f"--shm-size {needed // MIB}m of docker")
    return Finding("shared memory", "ok", text)


def _huge_pages(facts: Facts) -> Finding:
    if facts.huge_pages == "never":
        fix = "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"
        return Finding("huge pages", "note", "never: weights on a CPU are read slower", fix)
    return Finding("huge pages", "ok", facts.huge_pages or "unknown to this kernel")


def _open_files(facts: Facts) -> Finding:
    limit, needed = facts.max_open_files, facts.config.max_open_requests + SPARE_FILES
    text = f"up to {limit:,} in a process"
    if 0 <= limit < needed:
        text = f"{text}; max-open-requests = {facts.config.max_open_requests:,} needs {needed:,}"
        return Finding("open files", "note", text, "LimitNOFILE=65536 of systemd, or ulimit -Hn")
    return Finding("open files", "ok", text if limit >= 0 else "unlimited")


def _port(facts: Facts) -> Finding:
    if facts.serves_already:
        where = f"{facts.config.host}:{facts.config.port}"
        return Finding("port", "ok", f"{where} is that of a running server")
    if facts.port_error:
        text, _, fix = facts.port_error.partition("; try ")
        return Finding("port", "problem", text, fix or "--host 127.0.0.1")
    if facts.config.uds is not None:
        return Finding("port", "ok", f"none; the socket is {facts.config.uds}")
    return Finding("port", "ok", f"{facts.config.host}:{facts.config.port} is free")


def _mesh_dir(facts: Facts) -> Finding:
    if facts.mesh_dir_error:
        return Finding("mesh-dir", "problem", facts.mesh_dir_error, PLACES_OF_TMP)
    return Finding("mesh-dir", "ok", str(facts.config.mesh_dir))


def _gpus(facts: Facts) -> Finding:
    gpus, num_files = facts.devices.gpus, facts.num_gpu_files
    if facts.config.device == "cuda" and not gpus:
        return Finding("GPUs", "problem", "torch finds none, and device is cuda", "--device cpu")
    if not gpus and num_files:
        text = f"the driver has {num_files}, torch finds none"
        fix = (
            "a build of torch with CUDA for this driver" if not facts.devices.cuda else "nvidia-smi"
        )
        return Finding("GPUs", "note", text, fix)
    if not gpus:
        return Finding("GPUs", "ok", "none; workers compute on the CPU")
    old = [each for each in gpus if each.capability < MIN_CAPABILITY]
    names = ", ".join(f"{each.name} ({each.capability[0]}.{each.capability[1]})" for each in gpus)
    if old and facts.config.device != "cpu":
        text = f"{names}: compute capability 8.0 or newer is needed"
        return Finding("GPUs", "problem", text, "--device cpu, or CUDA_VISIBLE_DEVICES without it")
    return Finding("GPUs", "ok", names)


def _model(facts: Facts) -> Finding:
    if facts.model_error:
        fix = "" if facts.model_error.startswith("max-model-len") else "--model FOLDER"
        return Finding("model", "problem", facts.model_error, fix)
    config, weights = facts.config, facts.weights_bytes
    frees = [each.free_bytes for each in facts.devices.gpus if _uses_gpus(facts)]
    free = max(frees, default=facts.devices.free_bytes)
    text = f"{config.model}: {weights // MIB:,} MiB of weights"
    is_split = config.cpu_offload_gb or config.num_ranks > 1
    is_whole = config.quantization == "none" and not is_split
    if weights > free and is_whole and not facts.devices.error:
        text = f"{text}, {free // MIB:,} MiB are free"
        return Finding("model", "problem", text, "--quantization wint4; shoal plan shows sizes")
    return Finding("model", "ok", text)


def _docker(facts: Facts) -> Finding:
    if not facts.engine:
        return Finding("docker", "ok", "no engine answers; only the Compose stack needs one")
    text = f"engine {facts.engine}, compose {facts.compose or 'not installed'}"
    is_new = _version(facts.engine) >= MIN_ENGINE and _version(facts.compose) >= MIN_COMPOSE
    fix = "Docker Engine 20.10 and Compose 2.26, or newer, for the stack"
    return Finding("docker", "ok", text) if is_new else Finding("docker", "note", text, fix)


def _uses_gpus(facts: Facts) -> bool:
    return bool(facts.devices.gpus) and facts.config.device != "cpu"


def _version(text: str) -> tuple[int, ...]:
    """The first two numbers; empty without any."""
    return tuple(int(each) for each in re.findall(r"\d+", text)[:2])


CHECKS: tuple[Callable[[Facts], Finding], ...] = (
    *(_software, _packages, _processor, _cores, _memory, _shared_memory, _huge_pages),
    *(_open_files, _port, _mesh_dir, _gpus, _model, _docker),
)

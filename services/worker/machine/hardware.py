"""The machine as the worker finds it: device, dtype and memory."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from services.worker.machine.gpu_claim import claim_gpu
from shared.errors import ConfigError
from shared.process.cores import NODES, cgroup_folders, read_text

MEMINFO = Path("/proc/meminfo")
# The number of GEMMs with machine code in oneDNN's cache and in torch's, about 1 MB each.
KERNEL_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}


@dataclass(frozen=True)
class Memory:
    """Bytes of one device: the total that we may ever use, and the free part of it."""

    total: int
    free: int


def choose_device(wanted: str, gpu_claims: Path | None) -> torch.device:
    """``wanted`` is auto, cpu or cuda. With a folder ``gpu_claims`` a GPU is claimed there, and
    becomes the calling thread's current one; without, torch's current one is taken.

    Raises ConfigError if there is no device of this kind, or no free one.
    """
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("device: cuda is asked for, but torch finds no CUDA device")
    if not has_cuda or wanted == "cpu":
        return torch.device("cpu")
    if gpu_claims is None:
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device("cuda", claim_gpu(gpu_claims, _gpu_ids()).index)
    torch.cuda.set_device(device)  # for kernels that are launched without a device
    return device


def gpu_name() -> str:
    """The current GPU as its driver names it; a device engine that is tested on a CPU has none."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def choose_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """auto is bfloat16 if the device computes it, else float32."""
    if wanted != "auto":
        dtype: torch.dtype = getattr(torch, wanted)
        return dtype
    return torch.bfloat16 if _has_bfloat16(device) else torch.float32


def bound_kernel_caches() -> None:
    """In bfloat16 a CPU makes machine code for every number of tokens a step may have, and by
    default keeps 1024 of them in each of two caches: 0.9 GB that no memory plan counts. Must come
    before the first GEMM, when the caches are made; sizes that are already set stay."""
    for name, size in KERNEL_CACHES.items():
        os.environ.setdefault(name, size)


def compute_exactly() -> None:
    """Products on GPUs neither round float32 to TF32 nor add parts of a sum in 16 bits, as torch
    does by default or because of a variable of the environment."""
    products = torch.backends.cuda.matmul
    products.allow_tf32 = False
    # cuBLAS may still split a GEMM along K: torch allows no other setting on that backend.
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False


def read_memory(device: torch.device, numa_node: int | None = None) -> Memory:
    """A CPU's memory is the smallest of the machine's, of the NUMA node's that we are bound to, and
    of the cgroups' around us."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return Memory(total, free)
    fields = dict(line.split(":") for line in MEMINFO.read_text().splitlines())
    kib = {name: int(value.split()[0]) for name, value in fields.items()}
    rooms = [Memory(kib["MemTotal"] << 10, kib["MemAvailable"] << 10), *_cgroup_memory()]
    if numa_node is not None:
        rooms.append(_node_memory(numa_node))
    return Memory(min(room.total for room in rooms), min(room.free for room in rooms))


def why_out_of_memory(error: torch.OutOfMemoryError) -> str:
    """The requested and the free memory of a GPU."""
    first, _, _ = str(error).partition(" Process")  # then its owners, and the allocator's settings
    return first.strip().rstrip(".")


def _gpu_ids() -> list[str]:
    """The ids of the GPUs, in torch's order. Where a build of torch knows no UUIDs they are
    indices, which are only good for workers that see the same GPUs."""
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [str(getattr(gpu, "uuid", index)) for index, gpu in enumerate(gpus)]


def _has_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _node_memory(index: int) -> Memory:
    """The free memory of a NUMA node, with file caches that it can reclaim."""
    kib: dict[str, int] = {}
    for line in read_text(NODES / f"node{index}" / "meminfo").splitlines():
        _, _, name, value, *_ = line.split()
        kib[name.rstrip(":")] = int(value)
    num_free = kib["MemFree"] + kib.get("Inactive(file)", 0)
    return Memory(kib["MemTotal"] << 10, num_free << 10)


def _cgroup_memory() -> list[Memory]:
    """The limit and the rest of every cgroup around us that has one, in version 2 or 1."""
    found = []
    for controller, limit_name, used_name in (
        ("", "memory.max", "memory.current"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        for folder in cgroup_folders(controller):
            limit, used = read_text(folder / limit_name), read_text(folder / used_name)
            if limit.isdigit() and used.isdigit():
                free = int(limit) - int(used) + _file_cache(folder)
                found.append(Memory(int(limit), max(0, free)))
    return found


def _file_cache(folder: Path) -> int:
    """Bytes of a cgroup's reclaimable file cache, such as weights read before."""
    fields = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
    return int(fields.get("total_inactive_file") or fields.get("inactive_file") or 0)


def return_freed_memory() -> None:
    """Returns memory that loading has freed and the C library keeps to the system: another copy of
    the codes of a quantized model."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)

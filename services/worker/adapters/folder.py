"""Reads adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from kernels.cpu.adapter import bits_of
from services.worker.adapters.config import AdapterConfig, read_config
from services.worker.adapters.names import Target, check_copies, find_targets
from services.worker.adapters.sites import Layers, LoadedAdapter, LowRank
from services.worker.adapters.tensor_file import Stored, TensorFile
from services.worker.weights.checkpoint import StoredTensor
from shared.errors import ConfigError

WEIGHTS, PICKLED = "adapter_model.safetensors", "adapter_model.bin"

FindBase = Callable[[str], StoredTensor | None]


class Measured(NamedTuple):
    """Ranks by our names of layers, the bytes of the numbers, and those of the ``largest`` tensor
    while it is read."""

    ranks: Mapping[str, int]
    num_bytes: int
    largest: int


class AdapterFolder:
    """An adapter, of which nothing but names and shapes is read yet. Every tensor is used, or the
    error has its name. Raises ConfigError with the reason."""

    def __init__(self, name: str, folder: Path, layers: Layers, max_rank: int) -> None:
        self._name = name
        self._config = read_config(name, folder)
        self._file = _open_weights(folder)
        shapes = {name: stored.shape for name, stored in self._file.tensors.items()}
        self._targets, self._copies = find_targets(shapes, layers, self._config)
        for target in self._targets.values():
            if target.rank > max_rank:
                raise ConfigError(
                    f"rank {target.rank} of layer {target.layer}; max-lora-rank is {max_rank}"
                )

    def measure(self, dtype: torch.dtype) -> Measured:
        ranks = {ours: each.rank for each in self._targets.values() for ours in each.ours}
        numbers = sum(a + b for a, b in (each.sizes for each in self._targets.values()))
        largest = max(map(_read_bytes, self._file.tensors.values()))
        return Measured(ranks, numbers * dtype.itemsize, largest)

    def read(self, dtype: torch.dtype, find_base: FindBase = lambda name: None) -> LoadedAdapter:
        """The adapter in ``dtype``. Its digest is of its name and of all that the result depends
        on. ``find_base`` gives tensors of the base by our names."""
        check_copies(self._file, self._copies, find_base)
        digest = _new_digest(self._name, self._config)
        layers: dict[str, LowRank] = {}
        a: Tensor | None = None
        for name in sorted({*self._file.tensors} - {*self._copies}):
            tensor = self._file.read(name)
            _add_to_digest(digest, name, tensor)
            target = self._targets[name]
            if name == target.a:
                a = _narrow(tensor, dtype, target.layer)
                continue
            assert a is not None  # its name is the one before
            b = _narrow(tensor.float().mul_(target.scale), dtype, target.layer)
            layers.update(_split(target, a, b))
        return LoadedAdapter(
            digest=digest.hexdigest(),
            rank=max(each.rank for each in self._targets.values()),
            num_bytes=sum(tensor.nbytes for each in layers.values() for tensor in each),
            layers=layers,
        )


def _open_weights(folder: Path) -> TensorFile:
    path = folder / WEIGHTS
    if not path.is_file():
        has_pickle = (folder / PICKLED).is_file()
        hint = f"; {PICKLED} is not read, since it may run code" if has_pickle else ""
        raise ConfigError(f"the folder has no {WEIGHTS}{hint}")
    return TensorFile(path)


def _read_bytes(stored: Stored) -> int:
    """With its numbers in float32."""
    widened = stored.num_bytes * torch.float32.itemsize // stored.dtype.itemsize
    return stored.num_bytes + (0 if stored.dtype == torch.float32 else widened)


def _new_digest(name: str, config: AdapterConfig) -> "blake2b":
    return blake2b(msgspec.msgpack.encode((name, *config.facts)), digest_size=16)


def _add_to_digest(digest: "blake2b", name: str, tensor: Tensor) -> None:
    digest.update(msgspec.msgpack.encode((name, str(tensor.dtype), list(tensor.shape))))
    digest.update(tensor.flatten().view(torch.uint8).numpy().data)


def _split(target: Target, a: Tensor, b: Tensor) -> Iterator[tuple[str, LowRank]]:
    """Of experts in one tensor, ranks are side by side in A, and experts in B."""
    num = len(target.ours)
    if num == 1:
        yield target.ours[0], LowRank(a, b)
        return
    by_expert = b.view(len(b), target.rank, num).permute(2, 0, 1).contiguous()
    yield from zip(
        target.ours,
        (LowRank(*pair) for pair in zip(a.view(num, target.rank, -1), by_expert, strict=True)),
        strict=True,
    )


def _narrow(tensor: Tensor, dtype: torch.dtype, layer: str) -> Tensor:
    narrow = tensor.to(dtype)
    bits = bits_of(narrow)  # without signs in the order of the numbers; isfinite takes longer
    if (bits & np.iinfo(bits.dtype).max).max() >= bits_of(torch.tensor(torch.inf, dtype=dtype)):
        raise ConfigError(f"layer {layer}: values that are not finite in {dtype}")
    return narrow

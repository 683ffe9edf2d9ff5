"""Adapters in PEFT's format for tests."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from services.worker.adapters.sites import LowRank

Layers = Mapping[str, LowRank]


def random_layers(
    shapes: Mapping[str, tuple[int, int]], rank: int, seed: int, size: float = 0.2
) -> dict[str, LowRank]:
    """A and B of layers of ``shapes`` (outputs, inputs), float32."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return size * torch.randn(shape, generator=generator)

    return {
        name: LowRank(draw(rank, inputs), draw(outputs, rank))
        for name, (outputs, inputs) in shapes.items()
    }


def write_adapter(
    folder: Path,
    layers: Layers,
    *,
    prefix: str = "base_model.model.",
    more_tensors: Mapping[str, Tensor] | None = None,
    **config: Any,
) -> Path:
    """Writes a folder; ``config`` has further keys or other values of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    rank = max((len(each.a) for each in layers.values()), default=8)
    values = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"} | config
    (folder / "adapter_config.json").write_text(json.dumps(values))
    tensors = {}
    for name, (a, b) in layers.items():
        tensors[f"{prefix}{name}.lora_A.weight"] = a.contiguous()
        tensors[f"{prefix}{name}.lora_B.weight"] = b.contiguous()
    save_file(tensors | dict(more_tensors or {}), folder / "adapter_model.safetensors")
    return folder

"""Adapters by PEFT, and checkpoints with the adapters that PEFT merges into their weights."""

import json
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

STACKS = ["experts.gate_up_proj", "experts.up_proj", "experts.down_proj"]


class Written(NamedTuple):
    adapter: Path
    merged: Path


def open_base(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_random(base: Path, target: Path, seed: int, size: float = 0.3, **options: Any) -> Written:
    """An adapter with random A and B."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PEFT, for embeddings and for parameters
        config = LoraConfig(task_type="CAUSAL_LM", **options)
        adapted = get_peft_model(open_base(base), config)
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                factor = 1.0 if "_B" in name else parameter.shape[-1] ** -0.5
                drawn = torch.randn(parameter.shape, generator=generator)
                parameter.data.copy_(drawn * size * factor)
        adapted.save_pretrained(str(target / "adapter"))
        return Written(target / "adapter", _save_merged(adapted, base, target))


def write_tensors(
    base: Path, target: Path, tensors: Mapping[str, Tensor], **config: Any
) -> Written:
    """An adapter of ``tensors``, as an older PEFT wrote it, which today's merges."""
    folder = target / "adapter"
    folder.mkdir(parents=True)
    values = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(values))
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = PeftModel.from_pretrained(open_base(base), str(folder))
        return Written(folder, _save_merged(adapted, base, target))


def _save_merged(adapted: Any, base: Path, target: Path) -> Path:
    folder = target / "merged"
    adapted.merge_and_unload().save_pretrained(folder, max_shard_size="10MB")
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(base / name, folder / name)
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")

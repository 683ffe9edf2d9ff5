"""Tiny random checkpoints whose tokenizer is the beginning of the embedded model's."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import GptOssForCausalLM, Lfm2ForCausalLM

from benchmarks.harness.engines import make_engine
from shared.model_folder import EMBEDDED_MODEL, TOKENIZER_FILE
from tests.media.checkpoints import save_checkpoint
from tests.services.worker.checkpoints import save_model
from tests.services.worker.foreign_checkpoints import save_family
from tests.services.worker.gemma4 import EXPERTS as GEMMA4_EXPERTS
from tests.services.worker.gemma4 import GEMMA4
from tests.services.worker.hybrids import save_hybrid
from tests.services.worker.test_families import CASES, LFM, OSS
from tests.services.worker.test_mtp_families import FAMILIES, HYBRID_FAMILIES, Checkpoint

ADAPTERS = ("first", "second")
ADAPTED = re.compile(r"(model\.layers\..+_proj)\.weight")
RANK, SIZE = 4, 0.01  # size: of the elements of B A, about half
NUM_TOKENS = 512  # few, so that an output repeats itself and prompt lookup finds drafts
SIZES: dict[str, Any] = {"vocab_size": NUM_TOKENS, "eos_token_id": 2}


def save_experts(folder: Path) -> None:
    """GLM-4.5, with an MTP head."""
    _save_with_head(folder, "GLM-4.5")


def save_latent(folder: Path) -> None:
    """DeepSeek-V3, with an MTP head."""
    _save_with_head(folder, "DeepSeek-V3")


def save_windowed(folder: Path) -> None:
    """gpt-oss: sinks, and every second layer with a window of seven tokens."""
    save_model(folder, GptOssForCausalLM, **OSS, **SIZES)
    _save_tokenizer(folder)


def save_convolved(folder: Path) -> None:
    """LFM2: two layers of three are short convolutions, with a state of two tokens."""
    save_model(folder, Lfm2ForCausalLM, **LFM, **SIZES)
    _save_tokenizer(folder)


def save_stateful(folder: Path) -> None:
    """Qwen3.5: two layers of three have a state. With an MTP head."""
    _save_with_head(folder, "Qwen3.5")


def save_next(folder: Path) -> None:
    """Qwen3-Next: states and experts. With an MTP head."""
    _save_with_head(folder, "Qwen3-Next")


def save_scanned(folder: Path) -> None:
    """Granite 4: three layers of four are Mamba-2, with experts."""
    save_hybrid(folder, "granite 4, experts, biases of other GEMMs", **SIZES)
    _save_tokenizer(folder)


def save_decaying(folder: Path) -> None:
    """Kimi Linear: states that decay by channel, latent attention, experts."""
    save_hybrid(folder, "kimi", **SIZES)
    _save_tokenizer(folder)


def save_indexed(folder: Path) -> None:
    """DeepSeek-V3.2: a token attends to the keys that an indexer chooses."""
    family, changes = CASES["deepseek v3.2, yarn"]
    save_model(folder, family, **changes | SIZES)
    _save_tokenizer(folder)


def save_shared(folder: Path) -> None:
    """Gemma 4: layers that read the keys and values of earlier ones, inputs of layers, experts."""
    family, changes = GEMMA4["gemma 4, inputs of layers, shared keys and values"]
    sizes = SIZES | {"vocab_size_per_layer_input": NUM_TOKENS}
    save_model(folder, family, **changes | GEMMA4_EXPERTS | sizes)
    _save_tokenizer(folder)


def save_foreign(folder: Path) -> None:
    """Phi-3, an architecture of transformers alone."""
    save_family(folder, "Phi3ForCausalLM", **SIZES)
    _save_tokenizer(folder)


def save_seeing(folder: Path) -> None:
    """Qwen2.5-VL, with a tokenizer of bytes."""
    save_checkpoint(folder)


def save_deep(folder: Path) -> None:
    """Qwen3-VL: features of images are added after the first layers, too."""
    save_checkpoint(folder, family="qwen3-vl")


def save_modal(folder: Path) -> None:
    """ERNIE-4.5-VL: images have experts of their own. Native code computes half of each one."""
    save_checkpoint(folder, family="ernie4.5-vl", moe_intermediate_size=[64, 32])


def save_adapters(directory: Path, folder: Path) -> list[dict[str, str]]:
    """Writes adapters of the linear layers of the model in ``folder``; returns lora-modules."""
    generator = torch.Generator().manual_seed(5)
    for name in ADAPTERS:
        tensors = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, "pt") as weights:
                for weight in sorted(weights.keys()):
                    if layer := ADAPTED.fullmatch(weight):
                        outputs, inputs = weights.get_slice(weight).get_shape()
                        beginning = f"base_model.model.{layer[1]}.lora_"
                        a, b = (RANK, inputs), (outputs, RANK)
                        tensors[f"{beginning}A.weight"] = torch.randn(a, generator=generator)
                        tensors[f"{beginning}B.weight"] = torch.randn(b, generator=generator)
        (directory / name).mkdir(parents=True, exist_ok=True)
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": SIZE * RANK}
        (directory / name / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, directory / name / "adapter_model.safetensors")
    return [{"name": name, "path": str(directory / name)} for name in ADAPTERS]


def digests_of(folder: Path, modules: list[dict[str, str]]) -> tuple[str, ...]:
    """Digests, for requests."""
    engine = make_engine(folder, "torch", lora_modules=modules, max_model_len=16)
    return tuple(row.digest for each in engine.additions for row in each.store.rows)


def _save_with_head(folder: Path, name: str) -> None:
    torch.manual_seed(0)
    family = (FAMILIES | HYBRID_FAMILIES)[name]
    Checkpoint(replace(family, changes=family.changes | SIZES), folder)
    _save_tokenizer(folder)


def _save_tokenizer(folder: Path) -> None:
    tokenizer = json.loads((EMBEDDED_MODEL / TOKENIZER_FILE).read_text())
    model = tokenizer["model"]
    model["vocab"] = {piece: n for piece, n in model["vocab"].items() if n < NUM_TOKENS}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) in model["vocab"]]
    (folder / TOKENIZER_FILE).write_text(json.dumps(tokenizer))

"""Tiny random checkpoints."""

import copy
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel, Qwen2ForCausalLM

from benchmarks.harness.oracle import true_logits
from services.worker.layers.embedding import TokenRows
from services.worker.layers.linear import Linear
from services.worker.models.registry import MODELS
from services.worker.weights.online import ONLINE, Quantization
from shared.model_folder import weight_files
from tests.services.worker.prompts import VOCAB_SIZE as VOCAB_SIZE
from tests.services.worker.prompts import random_prompts as random_prompts

EOS_ID = 7
MAX_POSITIONS = 128
# Families of wings.
OPTIONAL = (
    *("BailingMoe", "DeepseekV32", "Gemma4", "GlmMoeDsa", "GraniteMoeHybrid", "KimiLinear"),
    *("Lfm2", "NemotronH", "Qwen3Next", "Qwen3_5"),
)
LESS_ONE = ("Gemma2", "Gemma3", "Qwen3Next", "Qwen3_5")  # families that store norms minus 1
SCALES = ("layer_scalar", "router.scale", "per_expert_scale")
SETTLED = 1e-4  # outputs may differ if two float32 scores are closer than this


def save_qwen2(folder: Path, shard_size: str = "60KB", **changes: Any) -> None:
    save_model(folder, Qwen2ForCausalLM, shard_size, **changes)


class Saved(NamedTuple):
    folder: Path
    model: PreTrainedModel
    random_state: torch.Tensor  # after its making


FOLDER = TemporaryDirectory(prefix="shoal-models-", ignore_cleanup_errors=True)
SAVED: dict[str, Saved] = {}
IN_FOLDERS: dict[Path, Saved] = {}


def save_model(
    folder: Path, family: type[PreTrainedModel], shard_size: str = "60KB", **changes: Any
) -> None:
    """Weights so wide that no two logits are close by chance; equal models are made once. Skips a
    test of a family that went with its wing."""
    if family.__name__.startswith(OPTIONAL) and family.__name__ not in MODELS:
        pytest.skip(f"{family.__name__} is gone")
    key = repr((family, shard_size, sorted(changes.items())))
    if key not in SAVED:
        SAVED[key] = make_model(family, shard_size, changes)
    saved = SAVED[key]
    torch.set_rng_state(saved.random_state)
    shutil.copytree(saved.folder, folder, dirs_exist_ok=True)
    IN_FOLDERS[folder] = saved


def oracle_of(folder: Path) -> PreTrainedModel:
    """A copy of the model in ``folder``, which is as it was saved."""
    saved = IN_FOLDERS[folder]
    for file in saved.folder.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes(), f"{file.name} was changed"
    return copy.deepcopy(saved.model).eval()


def make_model(family: type[PreTrainedModel], shard_size: str, changes: dict[str, Any]) -> Saved:
    shape: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": MAX_POSITIONS,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
    }
    assert family.config_class
    config = family.config_class(**(shape | changes))
    torch.manual_seed(20261121)
    model = family(config)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith(("bias", "norm.weight", "_1.weight", "_2.weight", ".D", *SCALES)):
            is_less_one = family.__name__.startswith(LESS_ONE) and "linear_attn" not in name
            mean = name.endswith(SCALES) or ("norm" in name and not is_less_one)
            torch.nn.init.normal_(tensor.data, mean=float(mean), std=0.3)
        if name.endswith("A_log"):  # states that last for some tokens, and for many
            torch.nn.init.uniform_(tensor.data, -5, 0)
    folder = Path(FOLDER.name, str(len(SAVED)))
    model.save_pretrained(folder, max_shard_size=shard_size)
    (folder / "tokenizer.json").write_text("{}")
    return Saved(folder, model, torch.get_rng_state())


def save_mimo(folder: Path, num_mtp_layers: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """A Qwen2 with MTP layers of its own; returns their tensors."""
    save_qwen2(folder, shard_size="10MB", **changes)
    (file,) = weight_files(folder)
    weights = load_file(file)
    mtp = {}
    for layer in range(num_mtp_layers):
        prefix = f"model.mtp_layers.{layer}."
        for name, tensor in weights.items():
            if name.startswith("model.layers.0."):
                mtp[prefix + name.removeprefix("model.layers.0.")] = torch.randn_like(tensor)
        mtp[prefix + "input_proj.weight"] = torch.randn(64, 128)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            mtp[f"{prefix}{name}.weight"] = torch.randn(64)
    save_file(weights | mtp, file)
    change_config(
        folder, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=num_mtp_layers
    )
    return mtp


def change_config(folder: Path, **values: Any) -> None:
    """None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def asked_once(oracle: PreTrainedModel) -> PreTrainedModel:
    """Its forward pass remembers the output of each prompt."""
    forward, outputs = oracle.forward, dict[tuple[int, ...], Any]()

    def remembered(ids: torch.Tensor) -> Any:
        key = tuple(ids[0].tolist())
        if key not in outputs:
            outputs[key] = forward(ids)
        return outputs[key]

    oracle.forward = remembered
    return oracle


def assert_greedy(oracle: PreTrainedModel, prompt: list[int], text: list[int]) -> None:
    """Every token of ``text`` has the highest logit, or one within ``SETTLED`` of it."""
    logits = true_logits(oracle, prompt + text)[len(prompt) - 1 : -1]
    gaps = logits.max(-1) - logits[np.arange(len(text)), text]
    assert gaps.max() < SETTLED, f"token {gaps.argmax()} is {gaps.max()} below the highest"


@contextmanager
def quantized(
    oracle: PreTrainedModel,
    quantization: Quantization,
    of_head: Quantization = "none",
    of_embeddings: Quantization = "none",
) -> Iterator[None]:
    """Within it, ``oracle``'s linear layers, head and embeddings (equal to a tied head) hold their
    dequantized weights."""
    head: Any = oracle.get_output_embeddings()
    table: Any = oracle.get_input_embeddings()
    own = head.weight  # or the embeddings'
    weights = {
        module.weight: module.weight.data
        for module in oracle.modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    for weight in weights if quantization != "none" else ():
        weight.data = ONLINE[quantization](weight.data).values
    if of_embeddings != "none":
        weights[table.weight] = table.weight.data
        table.weight.data = ONLINE[of_embeddings](table.weight.data).values
    if of_head != "none":
        head.weight = nn.Parameter(ONLINE[of_head](own.data).values)
    try:
        yield
    finally:
        head.weight = own
        for weight, values in weights.items():
            weight.data = values


def allocate(model: nn.Module, device: torch.device) -> None:
    """Gives all weights memory, as the loader does one by one."""
    for module in model.modules():
        if isinstance(module, Linear | TokenRows):
            module.allocate(device)

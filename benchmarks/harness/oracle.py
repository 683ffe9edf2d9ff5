"""Reference logits: a checkpoint's weights in transformers, in float32."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from shared.model_folder import weight_files


def load_as_qwen2(folder: Path) -> Qwen2ForCausalLM:
    """MiMo's trunk with tied embeddings as Qwen2 in float32, since transformers has no MiMo."""
    values = json.loads((folder / "config.json").read_text())
    for key in ("architectures", "model_type", "dtype", "torch_dtype"):
        values.pop(key, None)
    model = Qwen2ForCausalLM(Qwen2Config(**values)).eval()
    trunk = {
        name: tensor.float()
        for file in weight_files(folder)
        for name, tensor in load_file(file).items()
        if "mtp_layers" not in name
    }
    model.load_state_dict(trunk | {"lm_head.weight": trunk["model.embed_tokens.weight"]})
    return model


@torch.inference_mode()
def true_logits(oracle: PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), vocab_size] after every one of ``ids``."""
    return oracle(torch.tensor([ids])).logits[0].numpy()

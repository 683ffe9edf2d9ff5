"""Tiny random Gemma 4s, assistant models for them, and their drafts by transformers' classes."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4UnifiedAssistantConfig,
    Gemma4UnifiedAssistantForCausalLM,
)

from tests.services.worker.checkpoints import MAX_POSITIONS, VOCAB_SIZE, save_model
from tests.services.worker.gemma4 import FULL, GEMMA4, SLIDING, WINDOW

HIDDEN, OWN, NUM_CLUSTERS, NUM_CHOSEN = 64, 32, 20, 4
LAYERS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": OWN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": WINDOW,
    "max_position_embeddings": MAX_POSITIONS,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
KEYS_AS_VALUES = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
OF_MODELS: dict[str, dict[str, Any]] = {
    "gemma 4": KEYS_AS_VALUES,
    "gemma 4, inputs of layers, shared keys and values": {},
    "gemma 4, experts": KEYS_AS_VALUES,
    "gemma 4 with images": KEYS_AS_VALUES,
    "gemma 4 unified": KEYS_AS_VALUES,
    "gemma 4 unified with images": {},
}
OF_HEADS = {"per_layer_config": None, "global_head_dim": 32, "num_global_key_value_heads": 1}
"""Keys of published files in place of transformers' ones."""
CLUSTERS: dict[str, Any] = {
    "use_ordered_embeddings": True,
    "num_centroids": NUM_CLUSTERS,
    "centroid_intermediate_top_k": NUM_CHOSEN,
}


def save_target(folder: Path, name: str = "gemma 4", **changes: Any) -> None:
    family, shape = GEMMA4[name]
    save_model(folder, family, "10MB", **(shape | changes))


def save_assistant(
    folder: Path, name: str = "gemma 4", layers: dict[str, Any] | None = None, **changes: Any
) -> None:
    """For the model of ``name``. ``layers`` are keys of text_config, ``changes`` the others."""
    of_layers = LAYERS | OF_MODELS[name] | (layers or {})
    is_unified = name.startswith("gemma 4 unified")
    kind: Any = Gemma4UnifiedAssistantConfig if is_unified else Gemma4AssistantConfig
    family: Any = Gemma4UnifiedAssistantForCausalLM if is_unified else Gemma4AssistantForCausalLM
    if is_unified:
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            of_layers.pop(key)
    config = kind(text_config=of_layers, backbone_hidden_size=HIDDEN, **changes)
    torch.manual_seed(5)
    model = family(config)
    for tensor_name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if "norm" in tensor_name or tensor_name.endswith("layer_scalar"):
            torch.nn.init.normal_(tensor.data, mean=1.0, std=0.3)
        if tensor_name.endswith("token_ordering"):
            tensor.data = torch.randperm(len(tensor))
    model.save_pretrained(folder)


def change_keys(folder: Path, layers: dict[str, Any], changes: dict[str, Any]) -> None:
    """Of config.json; transformers refuses to write some. None removes one."""
    path = folder / "config.json"
    found = json.loads(path.read_text()) | changes
    if layers:
        of_layers = found["text_config"] | layers
        found["text_config"] = {key: each for key, each in of_layers.items() if each is not None}
    path.write_text(json.dumps(found))


def change_tensors(folder: Path, changes: dict[str, Tensor | None]) -> None:
    """None removes one."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: each for name, each in tensors.items() if each is not None}, path)


class PlainAssistant:
    """The model and its assistant as transformers computes them, without cache, steps or batches;
    its layers with a window see the keys that transformers' cache keeps of them."""

    def __init__(self, model: Path, assistant: Path) -> None:
        load = {"dtype": torch.float32, "attn_implementation": "eager"}
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, **load).eval()
        family: Any = Gemma4AssistantForCausalLM
        if "unified" in json.loads((assistant / "config.json").read_text())["model_type"]:
            family = Gemma4UnifiedAssistantForCausalLM
        self._assistant = family.from_pretrained(assistant, **load).eval()

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[1 + len(drafts), vocab_size] after ``ids``, and after each of ``drafts``."""
        done = self._model.model(
            torch.tensor([ids[:-1]]), return_shared_kv_states=True, use_cache=False
        )
        state, found = done.last_hidden_state[:, -1:], []
        shared = dict(done.shared_kv_states)
        keys, values = shared[SLIDING]
        shared[SLIDING] = keys[:, :, -WINDOW:], values[:, :, -WINDOW:]
        for token in [ids[-1], *drafts]:
            embedded = self._model.get_input_embeddings()(torch.tensor([[token]]))
            out = self._assistant(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=shared,
                use_cache=False,
            )
            state = out.last_hidden_state
            found.append(out.logits[0, 0])
        return torch.stack(found)

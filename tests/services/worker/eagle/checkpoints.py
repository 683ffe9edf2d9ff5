"""Tiny random models, EAGLE-3 heads for them, and their drafts in plain torch: float32, without
cache, steps or batches, as the papers and other servers have them."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu
from transformers import AutoModelForCausalLM

from tests.services.worker.checkpoints import VOCAB_SIZE

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFTED = 64, 80, 4, 1, 32, 100
EPS, THETA = 1e-5, 5000.0
LAYER = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 32,  # fewer than a sequence may have
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "vocab_size": VOCAB_SIZE,
}


def save_head(folder: Path, *, layout: str = "authors", **changes: Any) -> dict[str, Tensor]:
    """``layout``: that of the authors, or of ``speculators``. ``changes`` are keys of config.json;
    None removes one. Returns the tensors."""
    prefix = "midlayer." if layout == "authors" else "layers.0."
    given = {"draft_vocab_size": DRAFTED} | changes
    torch.manual_seed(3)
    if layout == "authors":
        config = LAYER | given
    else:
        layer = {key: given.pop(key) for key in LAYER if key in given}
        kind = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        config = {**kind, "transformer_layer_config": LAYER | layer, **given}
    config = {key: value for key, value in config.items() if value is not None}
    folder.mkdir(exist_ok=True)
    vocab_size = changes.get("vocab_size", VOCAB_SIZE)
    (folder / "config.json").write_text(json.dumps(config))
    num = changes.get("draft_vocab_size", DRAFTED) or vocab_size
    tensors = {
        f"{prefix}self_attn.q_proj.weight": _random(HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.k_proj.weight": _random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.v_proj.weight": _random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        f"{prefix}self_attn.o_proj.weight": _random(HIDDEN, HEADS * HEAD_DIM),
        f"{prefix}mlp.gate_proj.weight": _random(INNER, HIDDEN),
        f"{prefix}mlp.up_proj.weight": _random(INNER, HIDDEN),
        f"{prefix}mlp.down_proj.weight": _random(HIDDEN, INNER),
        "fc.weight": _random(HIDDEN, 3 * HIDDEN),
        "lm_head.weight": _random(num, HIDDEN),
    }
    names = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    norms = dict.fromkeys([*(prefix + name for name in names), "norm"], HIDDEN)
    if changes.get("norm_before_fc"):
        norms["input_norm"] = 3 * HIDDEN
    tensors |= {f"{name}.weight": torch.rand(size) + 0.5 for name, size in norms.items()}
    if num < vocab_size:
        ids = torch.randperm(vocab_size)[:num].sort().values
        tensors["d2t"] = ids - torch.arange(num)
        tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    """By names with two underscores for a dot; None removes one."""
    path = folder / "model.safetensors"
    given = {name.replace("__", "."): each for name, each in changes.items()}
    tensors = load_file(path) | given
    save_file({name: each for name, each in tensors.items() if each is not None}, path)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape) * 0.2


class PlainEagle:
    """The model and the head in two folders. ``tapped``: layers with inputs that the head reads."""

    def __init__(self, model: Path, head: Path, tapped: list[int]) -> None:
        self._trunk: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        stored = load_file(head / "model.safetensors").items()
        self._tensors = {name.replace("midlayer.", "layers.0."): each for name, each in stored}
        config = json.loads((head / "config.json").read_text())
        is_speculators = "transformer_layer_config" in config
        self._norms_residual = config.get("norm_before_residual", is_speculators)
        self._norms_output = config.get("norm_output", False)
        self._tapped = tapped

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[1 + len(drafts), vocab_size] after ``ids``, and after each of ``drafts``."""
        found = self._trunk(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        inputs = torch.cat([found[layer][0] for layer in self._tapped], -1)
        if "input_norm.weight" in self._tensors:
            inputs = self._norm(inputs, "input_norm")
        states, outs = linear(inputs, self._tensors["fc.weight"]), []
        for num in range(1 + len(drafts)):
            out = self._layer(states, torch.tensor([*ids, *drafts[:num]][1:]))[-1]
            normed = self._norm(out, "norm")
            states = torch.cat((states, (normed if self._norms_output else out)[None]))
            outs.append(normed)
        return self._spread(torch.stack(outs))

    def _spread(self, outs: Tensor) -> Tensor:
        """−inf for tokens that are never drafted."""
        own = self._tensors.get("lm_head.weight", self._trunk.lm_head.weight)
        logits, offsets = linear(outs, own), self._tensors.get("d2t")
        if offsets is None:
            return logits
        spread = torch.full((len(outs), VOCAB_SIZE), -torch.inf)
        spread[:, torch.arange(len(offsets)) + offsets] = logits
        return spread

    def _layer(self, states: Tensor, ids: Tensor) -> Tensor:
        """Pairs from position 0 on: [n, HIDDEN] → [n, HIDDEN]."""
        table = self._tensors.get("embed_tokens.weight", self._trunk.model.embed_tokens.weight)
        normed = self._norm(states, "layers.0.hidden_norm")
        embedded = self._norm(table[ids], "layers.0.input_layernorm")
        residual = normed if self._norms_residual else states
        x = residual + self._attention(torch.cat((embedded, normed), -1))
        y = self._norm(x, "layers.0.post_attention_layernorm")
        gate, up = self._linear(y, "mlp.gate_proj"), self._linear(y, "mlp.up_proj")
        return x + self._linear(silu(gate) * up, "mlp.down_proj")

    def _attention(self, x: Tensor) -> Tensor:
        query = _rotate(self._linear(x, "self_attn.q_proj").view(len(x), HEADS, HEAD_DIM))
        key = _rotate(self._linear(x, "self_attn.k_proj").view(len(x), KV_HEADS, HEAD_DIM))
        value = self._linear(x, "self_attn.v_proj").view(len(x), KV_HEADS, HEAD_DIM)
        query, key, value = (each.transpose(0, 1) for each in (query, key, value))
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self._linear(out.transpose(0, 1).flatten(1), "self_attn.o_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self._tensors[f"layers.0.{name}.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], EPS)


def _rotate(heads: Tensor) -> Tensor:
    """[n, heads, HEAD_DIM] at the positions 0 … n − 1."""
    half = HEAD_DIM // 2
    angles = torch.outer(torch.arange(len(heads)), THETA ** (-torch.arange(half) / half))[:, None]
    one, other = heads.split(half, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

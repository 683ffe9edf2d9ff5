"""Speculation in plain torch, without cache, steps or batches: the expected drafts.

The trunk is transformers' Qwen2; the head follows its description (arXiv 2505.07608): a decoder
layer on the projection of a normed hidden state and a normed embedding.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, silu
from transformers import Qwen2ForCausalLM

from benchmarks.harness.oracle import load_as_qwen2
from shared.model_folder import weight_files

PREFIX = "model.mtp_layers.0."


class PlainMtp:
    """The checkpoint in ``folder``, in float32."""

    def __init__(self, folder: Path) -> None:
        self.trunk: Qwen2ForCausalLM = load_as_qwen2(folder)
        self._weights = {
            name.removeprefix(PREFIX): tensor.float()
            for file in weight_files(folder)
            for name, tensor in load_file(file).items()
            if name.startswith(PREFIX)
        }
        config = self.trunk.config
        self._eps, self._theta = config.rms_norm_eps, config.rope_parameters["rope_theta"]
        self._num_heads = config.num_attention_heads
        self._num_kv_heads = config.num_key_value_heads

    @torch.inference_mode()
    def states(self, ids: list[int]) -> Tensor:
        """[len(ids), hidden], before the last norm."""
        found: list[Tensor] = []
        norm = self.trunk.model.norm
        hook = norm.register_forward_pre_hook(lambda module, args: found.append(args[0]))
        self.trunk(torch.tensor([ids]))
        hook.remove()
        return found[0][0]

    @torch.inference_mode()
    def draft_logits(self, ids: list[int], drafts: list[int]) -> Tensor:
        """[1 + len(drafts), vocab_size] after ``ids``, and after each of ``drafts``: each draft is
        paired with the head's own previous state."""
        states = self.states(ids[:-1])
        outs = []
        for num in range(1 + len(drafts)):
            out = self._layer(states, torch.tensor([*ids, *drafts[:num]][1:]))[-1]
            states = torch.cat((states, out[None]))
            outs.append(self._norm(out, "final_layernorm"))
        return linear(torch.stack(outs), self.trunk.model.embed_tokens.weight)

    def _layer(self, states: Tensor, ids: Tensor) -> Tensor:
        """Pairs from position 0 on: [n, hidden] → [n, hidden]."""
        embedded = self._norm(self.trunk.model.embed_tokens(ids), "token_layernorm")
        both = torch.cat((self._norm(states, "hidden_layernorm"), embedded), -1)
        x = linear(both, self._weights["input_proj.weight"])
        x = x + self._attention(self._norm(x, "input_layernorm"))
        y = self._norm(x, "post_attention_layernorm")
        names = ("gate", "up", "down")
        gate, up, down = (self._weights[f"mlp.{name}_proj.weight"] for name in names)
        return x + linear(silu(linear(y, gate)) * linear(y, up), down)

    def _attention(self, x: Tensor) -> Tensor:
        query = self._rotate(self._heads(x, "q", self._num_heads))
        key = self._rotate(self._heads(x, "k", self._num_kv_heads))
        value = self._heads(x, "v", self._num_kv_heads)
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return linear(out.transpose(0, 1).flatten(1), self._weights["self_attn.o_proj.weight"])

    def _heads(self, x: Tensor, name: str, num: int) -> Tensor:
        """[n, hidden] → [num, n, head_dim]"""
        prefix = f"self_attn.{name}_proj."
        y = linear(x, self._weights[prefix + "weight"], self._weights[prefix + "bias"])
        return y.view(len(x), num, -1).transpose(0, 1)

    def _rotate(self, heads: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        frequencies = self._theta ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(heads.shape[1]), frequencies)
        one, other = heads.split(half, -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((one * cos - other * sin, other * cos + one * sin), -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._eps).rsqrt()
        return x * scale * self._weights[f"{name}.weight"]

"""Writes GGUF files of model folders as llama.cpp's converter does, and folders of their values."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, dequantize, quantize
from gguf.constants import GGML_QUANT_SIZES
from safetensors.torch import load_file, save_file

from shared.model_folder import weight_files

K_TYPES = ("Q4_K", "Q5_K", "Q6_K")
ARCHS = {
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "llama": "llama",
    "mimo": "qwen2",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.*.gate_proj": "ffn_gate_exps",
    "mlp.experts.*.up_proj": "ffn_up_exps",
    "mlp.experts.*.down_proj": "ffn_down_exps",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.experts.*.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.*.w3": "ffn_up_exps",
    "block_sparse_moe.experts.*.w2": "ffn_down_exps",
}
GEMMA_PARTS = PARTS | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
EXPERT = re.compile(r"(.+\.experts\.)(\d+)(\..+)")


class Made:
    """A file ``path`` of the weights in ``folder``, of type ``kind`` where the widths allow it, and
    of ``others`` by the end of a tensor's name. ``values`` are those that the file holds, by their
    names in the folder."""

    def __init__(
        self,
        folder: Path,
        path: Path,
        kind: str = "F32",
        others: dict[str, str] | None = None,
        **changes: Any,
    ) -> None:
        self.path, self._kind, self._others = path, kind, others or {}
        self._config = json.loads((folder / "config.json").read_text())
        self._arch = ARCHS[self._config["model_type"]]
        self._rng = np.random.default_rng(7)
        self.values: dict[str, torch.Tensor] = {}
        self.writer = GGUFWriter(path, self._arch, **changes.pop("writer", {}))
        self._add_shape()
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        _add_tokenizer(self.writer, tokenizer, self._config)
        for key, value in changes.items():
            self.writer.add_uint32(key.replace("__", "."), value)
        for name, tensor in self._weights(folder):
            self._add(name, tensor)

    def write(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path

    def save_values(self, folder: Path, source: Path) -> Path:
        """A folder as ``source``, with the values of the file in float32."""
        folder.mkdir()
        for name in ("config.json", "tokenizer.json"):
            (folder / name).write_bytes((source / name).read_bytes())
        save_file(self.values, folder / "model.safetensors", {"format": "pt"})
        return folder

    def _add_shape(self) -> None:
        config, writer = self._config, self.writer
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
        whole = rope.get("full_attention", rope)
        writer.add_rope_freq_base(whole["rope_theta"])
        if self._arch.startswith("gemma"):
            writer.add_sliding_window(config["sliding_window"])
        if cap := config.get("attn_logit_softcapping"):
            writer.add_attn_logit_softcapping(cap)
        if cap := config.get("final_logit_softcapping"):
            writer.add_final_logit_softcapping(cap)
        if experts := config.get("num_local_experts", config.get("num_experts")):
            writer.add_expert_count(experts)
            writer.add_expert_used_count(config["num_experts_per_tok"])
            if "moe_intermediate_size" in config:
                writer.add_expert_feed_forward_length(config["moe_intermediate_size"])

    def _weights(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """All experts of a layer are one."""
        stacks: dict[str, dict[int, torch.Tensor]] = defaultdict(dict)
        for file in weight_files(folder):
            for name, tensor in load_file(file).items():
                if found := EXPERT.fullmatch(name):
                    stacks[f"{found[1]}*{found[3]}"][int(found[2])] = tensor.float()
                elif "mtp" not in name:
                    yield name, tensor.float()
        for name, stack in stacks.items():
            yield name, torch.stack([stack[number] for number in range(len(stack))])

    def _add(self, name: str, tensor: torch.Tensor) -> None:
        """Converts one as llama.cpp does, and keeps the values that it has there."""
        module, _, suffix = name.rpartition(".")
        parts = GEMMA_PARTS if self._arch.startswith("gemma") else PARTS
        if name.startswith("model.layers."):
            _, _, layer, part = module.split(".", 3)
            theirs = f"blk.{layer}.{parts[part]}.{suffix}"
        else:
            theirs = f"{OUTSIDE[module]}.{suffix}"
        heads = 0
        if self._arch == "llama" and theirs.split(".")[-2] in ("attn_q", "attn_k"):
            is_query = "attn_q" in theirs
            heads = self._config["num_attention_heads" if is_query else "num_key_value_heads"]
        if heads:
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
        is_offset = self._arch.startswith("gemma") and name.endswith("norm.weight")
        stored = self._put(theirs, tensor + 1 if is_offset else tensor)
        if is_offset:
            stored = stored - 1
        if heads:
            stored = stored.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        if "*" in name:
            each = {name.replace("*", str(at)): one for at, one in enumerate(stored.unbind())}
            self.values |= {key: one.contiguous() for key, one in each.items()}
        else:
            self.values[name] = stored.contiguous()

    def _put(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kind = self._kind
        for end, other in self._others.items():
            kind = other if name.endswith(end) else kind
        is_small = tensor.ndim == 1 or "ffn_gate_inp" in name
        if is_small or tensor.shape[-1] % GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]:
            kind = "F32"
        type_ = GGMLQuantizationType[kind]
        raw = self._raw(tensor.numpy(), type_)
        self.writer.add_tensor(name, raw, raw_dtype=type_)
        return torch.from_numpy(dequantize(raw, type_).reshape(tensor.shape).copy())

    def _raw(self, values: np.ndarray, type_: GGMLQuantizationType) -> np.ndarray:
        if type_.name not in K_TYPES:
            return quantize(values, type_)
        *rows, width = values.shape
        return random_blocks(self._rng, type_, (*rows, width // 256))


def random_blocks(
    rng: np.random.Generator, type_: GGMLQuantizationType, shape: tuple[int, ...]
) -> np.ndarray:
    """Blocks of any codes, and scales of weights' sizes: bytes [..., blocks · bytes]."""
    _, num_bytes = GGML_QUANT_SIZES[type_]
    blocks = rng.integers(0, 256, (*shape, num_bytes), np.uint8)
    scales = rng.uniform(1e-4, 4e-4, (*shape, 2)).astype(np.float16)
    if type_.name == "Q6_K":
        blocks[..., -2:] = scales[..., :1].view(np.uint8)
    else:
        scales[..., 1] *= np.float16(8)
        blocks[..., :4] = scales.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    """That of the folder if it is byte-level BPE, else one with the same number of letters."""
    size = config["vocab_size"]
    letters = [chr(0x4E00 + number) for number in range(size - 1)]
    made = {text: id for id, text in enumerate([*letters, "".join(letters[:2])])}
    ids = tokenizer.get("model", {}).get("vocab") or made
    special_ids = {each["id"] for each in tokenizer.get("added_tokens", [])}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(
        [TokenType.CONTROL if id in special_ids else TokenType.NORMAL for id in range(len(ids))]
    )
    merges = tokenizer.get("model", {}).get("merges") or [letters[:2]]
    writer.add_token_merges([" ".join(each) for each in merges])
    eos = config["eos_token_id"]
    writer.add_eos_token_id(eos if isinstance(eos, int) else eos[0])
    writer.add_add_bos_token(False)


def add_shape_of_nothing(
    writer: GGUFWriter, num_tokens: int, *, num_layers: int = 0, skip: str = ""
) -> None:
    """The metadata of a model of width 32 and its tensors outside of layers, but ``skip``."""
    numbers: dict[str, float] = {
        "block_count": num_layers,
        "context_length": 64,
        "embedding_length": 32,
        "feed_forward_length": 64,
        "head_count": 2,
        "layer_norm_rms_eps": 1e-6,
    }
    for name, value in numbers.items():
        if name != skip:
            getattr(writer, f"add_{name}")(value)
    sizes = {"token_embd.weight": (num_tokens, 32), "output_norm.weight": (32,)}
    for name, shape in sizes.items():
        if name != skip:
            writer.add_tensor(name, np.zeros(shape, np.float32))


def add_layer(writer: GGUFWriter, layer: int, skip: str = "") -> None:
    """A layer of width 32, but ``skip``."""
    sizes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("attn_norm", "ffn_norm"), (32,)),
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (32, 32)),
        **dict.fromkeys(("ffn_gate", "ffn_up"), (64, 32)),
        "ffn_down": (32, 64),
    }
    for part, shape in sizes.items():
        name = f"blk.{layer}.{part}.weight"
        if name != skip:
            writer.add_tensor(name, np.zeros(shape, np.float32))

"""Converts a checkpoint of ``benchmarks.checkpoints`` to llama.cpp's format, in bfloat16.

Needs only the package ``gguf`` and numpy, so that it also runs in an environment of its own. Norms
and routers become float32, as in llama.cpp, and a layer's experts one tensor, held in memory as a
whole.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
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
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
GEMMA_NAMES = NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
EXPERT = re.compile(r"(.+\.experts)\.(\d+)(\..+)")


def convert(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    is_gemma = config["model_type"] == "gemma3_text"
    names = GEMMA_NAMES if is_gemma else NAMES
    writer = GGUFWriter(path, "gemma3" if is_gemma else config["model_type"].replace("_", ""))
    _add_shape(writer, config)
    _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text()), config)
    for name, bits in _weights(folder / "model.safetensors", names):
        if bits.ndim == 1 or "ffn_gate_inp" in name:  # a bfloat16 is the upper half of a float32
            numbers = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(name, numbers + 1 if is_gemma else numbers)
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if window := config.get("sliding_window"):
        writer.add_sliding_window(window)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_tokenizer(writer: GGUFWriter, tokenizer: dict[str, Any], config: dict[str, Any]) -> None:
    ids = tokenizer["model"]["vocab"]
    special_ids = {each["id"] for each in tokenizer["added_tokens"]}
    types = [
        TokenType.CONTROL if number in special_ids else TokenType.NORMAL
        for number in range(len(ids))
    ]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(ids, key=ids.__getitem__))
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def _weights(path: Path, names: dict[str, str]) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names, and the bits of bfloat16 values as uint16."""
    stacks: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for name, bits in _tensors(path):
        if found := EXPERT.fullmatch(name):
            stacks[found[1] + found[3]][int(found[2])] = bits
        else:
            yield _name(name, names), bits
    for name, experts in stacks.items():
        yield _name(name, names), np.stack([experts[number] for number in range(len(experts))])


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    data = np.memmap(path, mode="r")
    header_bytes = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + header_bytes].tobytes())
    header.pop("__metadata__", None)
    for name, entry in header.items():
        start, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        bits = data[start:end].view(np.uint16).reshape(entry["shape"])
        yield name.removesuffix(".weight"), bits


def _name(name: str, names: dict[str, str]) -> str:
    if name.startswith("model.layers."):
        number, part = name.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{names[part]}.weight"
    return f"{names[name]}.weight"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="a checkpoint's")
    parser.add_argument("path", type=Path, help="of the file to write")
    convert(**vars(parser.parse_args()))

"""Checkpoints for server benchmarks: Qwen3, Qwen3.5 and Gemma 3 with random weights, in bfloat16.

``small`` has 27 million parameters, ``medium`` the shape of Qwen3-0.6B with a smaller vocabulary,
``moe`` 64 experts per layer and 8 per token: 2.3 billion parameters, with as many active ones as
``medium`` has. ``small-moe`` is ``small`` with 32 experts per layer and 4 per token. ``windows``
has the shape of Gemma-3-270M: of six layers five have a window of 512 tokens. ``states`` has the
shape of Qwen3.5-0.8B, with a smaller vocabulary: of four layers three have a state. ``mamba`` is
like the dense models of Granite 4, in the size of ``medium``: of eight layers seven have the state
of Mamba-2. The tokenizers are trained on the source of Python's standard library. Each folder loads
in shoal, vLLM and transformers; ``benchmarks.to_gguf`` or llama.cpp's own converter converts it.
"""

import argparse
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

FOLDER = Path.home() / ".cache" / "shoal-bench"
EOS = "<|endoftext|>"
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "vocab_size": 4096,
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "intermediate_size": 1536,
    },
    "medium": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 3072,
    },
}
SHAPES["moe"] = SHAPES["medium"] | {
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,  # llama.cpp supports no other
}
SHAPES["small-moe"] = SHAPES["small"] | {
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 384,
    "norm_topk_prob": True,
}
SHAPES["windows"] = {
    "vocab_size": 4096,
    "hidden_size": 640,
    "num_hidden_layers": 18,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "intermediate_size": 2048,
    "sliding_window": 512,
}
SHAPES["states"] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 3584,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
}
SHAPES["mamba"] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2560,
    "shared_intermediate_size": 2560,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 32,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
}
MAMBA_INTERVAL = 8  # of its layers with attention


def checkpoint(name: str, parent: Path = FOLDER) -> Path:
    """The folder of checkpoint ``name``, a key of SHAPES; writes it if missing."""
    folder = parent / name
    if not (folder / "model.safetensors").exists():  # written last
        save_tokenizer(folder, SHAPES[name]["vocab_size"])
        _save_model(folder, config_of(name))
    return folder


def config_of(name: str) -> PretrainedConfig:
    shape: dict[str, Any] = SHAPES[name]
    families = {
        "num_experts": "qwen3_moe",
        "sliding_window": "gemma3_text",
        "linear_num_key_heads": "qwen3_5_text",
        "mamba_n_heads": "granitemoehybrid",
    }
    if "mamba_n_heads" in shape:
        layers = range(1, shape["num_hidden_layers"] + 1)
        kinds = ["mamba" if each % MAMBA_INTERVAL else "attention" for each in layers]
        shape = shape | {"layer_types": kinds, "position_embedding_type": "nope"}
    return AutoConfig.for_model(
        next((family for key, family in families.items() if key in shape), "qwen3"),
        **shape,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )


def bytes_read(name: str, num_rows: int, num_cached: int, bits: float) -> float:
    """Bytes read by a decode step of ``num_rows`` sequences with ``num_cached`` tokens in the
    cache: layers at ``bits`` per weight, the expected number of used experts under random choice,
    and output head and cache in bfloat16. States are read and written, in float32."""
    shape = SHAPES[name]
    hidden, key_size = shape["hidden_size"], shape["head_dim"] * shape["num_key_value_heads"]
    mlp = 3.0 * hidden * shape["intermediate_size"]
    if num_experts := shape.get("num_experts"):
        share_hit = 1 - (1 - shape["num_experts_per_tok"] / num_experts) ** num_rows
        mlp = 3 * hidden * shape["moe_intermediate_size"] * num_experts * share_hit
    attention = 2 * hidden * (shape["head_dim"] * shape["num_attention_heads"] + key_size)
    layer = (attention + mlp) * bits / 8 + num_rows * num_cached * 2 * key_size * 2
    num_layers, of_states = shape["num_hidden_layers"], 0.0
    if interval := shape.get("full_attention_interval") or MAMBA_INTERVAL * (
        "mamba_n_heads" in shape
    ):
        weights, state = _mamba(shape) if "mamba_n_heads" in shape else _delta(shape)
        num_states = num_layers - num_layers // interval
        of_states = num_states * ((weights + mlp) * bits / 8 + num_rows * 2 * 4 * state)
        num_layers //= interval
    if "linear_num_key_heads" in shape:
        layer += hidden * shape["head_dim"] * shape["num_attention_heads"] * bits / 8  # gates
    return num_layers * layer + of_states + 2 * shape["vocab_size"] * hidden


def _delta(shape: dict[str, int]) -> tuple[int, int]:
    """Weights and numbers of a state of a layer of gated delta rules."""
    num_heads = shape["linear_num_value_heads"]
    value_size = num_heads * shape["linear_value_head_dim"]
    channels = 2 * shape["linear_num_key_heads"] * shape["linear_key_head_dim"] + value_size
    weights = shape["hidden_size"] * (channels + 2 * value_size + 2 * num_heads)
    weights += channels * shape["linear_conv_kernel_dim"]
    return weights, value_size * shape["linear_key_head_dim"]


def _mamba(shape: dict[str, int]) -> tuple[int, int]:
    num_heads, key_dim = shape["mamba_n_heads"], shape["mamba_d_state"]
    value_size = num_heads * shape["mamba_d_head"]
    channels = value_size + 2 * key_dim
    weights = shape["hidden_size"] * (channels + 2 * value_size + num_heads)
    return weights + channels * shape["mamba_d_conv"], value_size * key_dim


def save_tokenizer(
    folder: Path, vocab_size: int, added: Sequence[str] = (), template: str | None = None
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer like GPT-2's, with merges in order of frequency, ``added`` tokens
    and a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS, *added],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"the texts gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
    made.chat_template = template
    made.save_pretrained(folder)
    return made


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test"} & set(path.parts):
            yield path.read_text(errors="replace")


def _save_model(folder: Path, config: PretrainedConfig) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER, help="(default: %(default)s)"
    )
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=["small", "medium"])
    arguments = parser.parse_args()
    for each in arguments.models:
        print(checkpoint(each, arguments.folder))

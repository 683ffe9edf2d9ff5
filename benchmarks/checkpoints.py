"""The two models that servers are measured with: Qwen3 with random weights, in bfloat16.

``small`` has 27 million parameters, ``medium`` the shape of Qwen3-0.6B with a smaller vocabulary.
Their tokenizers are trained on the source of Python's standard library. Each folder loads in shoal,
vLLM and transformers; ``benchmarks.gguf`` turns it into llama.cpp's format.
"""

import argparse
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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


def checkpoint(name: str, parent: Path = FOLDER) -> Path:
    """The folder of ``name``, a key of SHAPES, which is written where it is missing."""
    folder = parent / name
    if not (folder / "model.safetensors").exists():  # which is written last
        _save_tokenizer(folder, SHAPES[name]["vocab_size"])
        _save_model(folder, SHAPES[name])
    return folder


def _save_tokenizer(folder: Path, vocab_size: int) -> None:
    """GPT-2's kind: bytes, its way to split words, and merges in order of frequency."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise RuntimeError(f"the texts gave {tokenizer.get_vocab_size()} tokens, not {vocab_size}")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS).save_pretrained(folder)


def _texts() -> Iterator[str]:
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        if not {"site-packages", "dist-packages", "test"} & set(path.parts):
            yield path.read_text(errors="replace")


def _save_model(folder: Path, shape: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        **shape,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,
    )
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "folder", type=Path, nargs="?", default=FOLDER, help="(default: %(default)s)"
    )
    for each in SHAPES:
        print(checkpoint(each, parser.parse_args().folder))

"""Tiny random encoders with tokenizers of their kind, and transformers' answers."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

WORDS = ["who", "leads", "the", "shoal", "no", "fish", "does", "it", "rains", "on", "open", "sea"]
SPECIAL = ["<pad>", "<unk>", "<s>", "</s>"]
VOCAB_SIZE = 64
MAX_POSITIONS = 160
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_POSITIONS,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "initializer_range": 0.2,
}


def save_encoder(folder: Path, family: type[PreTrainedModel], **changes: Any) -> None:
    """Its tokenizer gives the second text of a pair the type 1 if the model has types."""
    assert family.config_class
    config = family.config_class(**(SHAPE | changes))
    torch.manual_seed(20261128)
    model = family(config)
    for name, tensor in model.named_parameters():
        if name.endswith("bias") or "norm" in name.lower():
            torch.nn.init.normal_(tensor.data, mean=float(name.endswith("weight")), std=0.3)
    model.save_pretrained(folder)
    save_tokenizer(folder, second_type=int(getattr(config, "type_vocab_size", 1) > 1))


def save_tokenizer(folder: Path, second_type: int) -> None:
    vocab = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> $B:{second_type} </s>:{second_type}",
        special_tokens=[("<s>", 2), ("</s>", 3)],
    )
    tokenizer.save(str(folder / "tokenizer.json"))


def save_modules(folder: Path, mode: str, *names: str, max_length: int | None = None) -> None:
    """The files of sentence-transformers: a pooling ``mode``, and further modules."""
    steps = [("", "Transformer"), ("1_Pooling", "Pooling")]
    steps += [(f"{number}_{name}", name) for number, name in enumerate(names, 2)]
    listed = [
        {"idx": number, "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{each}": each == mode for each in ("cls_token", "mean_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    if max_length is not None:
        (folder / "sentence_bert_config.json").write_text(
            json.dumps({"max_seq_length": max_length, "do_lower_case": False})
        )


def save_dense(
    folder: Path, number: int, inputs: int, outputs: int, activation: str = "Identity"
) -> None:
    path = folder / f"{number}_Dense"
    path.mkdir(exist_ok=True)
    options = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": False,
        "activation_function": f"torch.nn.modules.linear.{activation}",
    }
    (path / "config.json").write_text(json.dumps(options))
    torch.manual_seed(number)
    save_file({"linear.weight": torch.randn(outputs, inputs) / 8}, path / "model.safetensors")


def dense_of(folder: Path, number: int) -> np.ndarray:
    weights = load_file(folder / f"{number}_Dense" / "model.safetensors")
    return weights["linear.weight"].numpy()


def random_texts(num: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Ids of a vocabulary's ordinary words, framed like every text, of lengths 2 to ``longest``."""
    random = np.random.default_rng(seed)
    lengths = random.integers(0, longest - 1, num)
    return [[2, *random.integers(4, VOCAB_SIZE, length).tolist(), 3] for length in lengths]


@torch.inference_mode()
def states_of(folder: Path, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """transformers' last states [T, hidden_size], of each text by itself."""
    model = AutoModel.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts]


def embeddings_of(folder: Path, texts: Sequence[list[int]], mode: str) -> np.ndarray:
    """[n, hidden_size], by the formula of sentence-transformers with a module Normalize."""
    return pooled(states_of(folder, texts), mode)


def pooled(states: list[torch.Tensor], mode: str) -> np.ndarray:
    rows = [each.mean(0) if mode == "mean" else each[0] for each in states]
    return torch.nn.functional.normalize(torch.stack(rows), dim=-1).numpy()


@torch.inference_mode()
def class_logits(
    folder: Path, texts: Sequence[list[int]], types: Sequence[list[int]] | None = None
) -> np.ndarray:
    """[n, num_labels], by transformers; ``types`` are the token types of each text."""
    model = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for number, ids in enumerate(texts):
        more = {} if types is None else {"token_type_ids": torch.tensor([types[number]])}
        found.append(model(torch.tensor([ids]), **more).logits[0])
    return torch.stack(found).numpy()

"""Tiny random pooling models, with the embedded model's tokenizer, and transformers' answers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    PreTrainedModel,
    Qwen3ForCausalLM,
    Qwen3ForSequenceClassification,
    Qwen3Model,
)

from shared.model_folder import EMBEDDED_MODEL
from tests.services.worker.checkpoints import change_config, save_model

SHAPE: dict[str, Any] = {
    "vocab_size": 8224,
    "hidden_size": 64,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
MODES = ("cls_token", "mean_tokens", "lasttoken", "max_tokens")
NO, YES = "no", "yes"
END = "<|endoftext|>"


def save_embedder(
    folder: Path, mode: str = "lasttoken", modules: tuple[str, ...] = ("Normalize",), **changes: Any
) -> None:
    """Like Qwen3-Embedding: tensors without the trunk's prefix, under the decoder's name, and the
    files of sentence-transformers. Its tokenizer ends every text with END."""
    save_model(folder, Qwen3Model, **SHAPE, **changes)
    change_config(folder, architectures=["Qwen3ForCausalLM"], tie_word_embeddings=True)
    steps = [("", "Transformer"), ("1_Pooling", "Pooling")]
    steps += [(f"{number}_{name}", name) for number, name in enumerate(modules, 2)]
    listed = [
        {"idx": number, "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(steps)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{each}": each == mode for each in MODES}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes | {"include_prompt": True}))
    save_tokenizer(folder, ends=True)


def save_reranker(folder: Path, **changes: Any) -> None:
    """A generating model, like Qwen3-Reranker."""
    save_model(folder, Qwen3ForCausalLM, **(SHAPE | {"tie_word_embeddings": True} | changes))
    save_tokenizer(folder, ends=False)


def save_classifier(folder: Path, num_labels: int, **changes: Any) -> None:
    labels = {number: f"label {number}" for number in range(num_labels)}
    save_model(folder, Qwen3ForSequenceClassification, **SHAPE, id2label=labels, **changes)
    save_tokenizer(folder, ends=False)


def save_tokenizer(folder: Path, *, ends: bool) -> None:
    tokenizer = Tokenizer.from_file(str(EMBEDDED_MODEL / "tokenizer.json"))
    tokenizer.add_special_tokens([END])
    tokenizer.add_tokens([NO, YES])
    if ends:
        end = tokenizer.token_to_id(END)
        tokenizer.post_processor = TemplateProcessing(
            single=f"$A {END}", pair=f"$A {END} $B {END}", special_tokens=[(END, end)]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab_size = tokenizer.get_vocab_size()
    assert vocab_size <= SHAPE["vocab_size"], vocab_size


def read_tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@torch.inference_mode()
def states_of(folder: Path, texts: list[list[int]]) -> list[torch.Tensor]:
    """transformers' states after the last norm [T, hidden_size], of each text by itself."""
    model = Qwen3Model.from_pretrained(folder, dtype=torch.float32).eval()
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in texts]


def pooled(state: torch.Tensor, mode: str = "lasttoken") -> np.ndarray:
    """[T, hidden_size] → a vector, as sentence-transformers pools it."""
    by_mode = {"lasttoken": state[-1], "mean_tokens": state.mean(0), "cls_token": state[0]}
    return by_mode[mode].numpy()


def normalized(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@torch.inference_mode()
def class_logits(folder: Path, texts: list[list[int]]) -> np.ndarray:
    """[n, num_labels], by transformers."""
    model = Qwen3ForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    model.config.pad_token_id = 0
    return np.stack([model(torch.tensor([ids])).logits[0].numpy() for ids in texts])


@torch.inference_mode()
def yes_probabilities(folder: Path, texts: list[list[int]]) -> np.ndarray:
    """[n], by the formula in Qwen3-Reranker's model card."""
    model: PreTrainedModel = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = read_tokenizer(folder)
    ids = [tokenizer.token_to_id(each) for each in (NO, YES)]
    found = [model(torch.tensor([text])).logits[0, -1, ids] for text in texts]
    return np.array([torch.softmax(each, -1)[1].item() for each in found])

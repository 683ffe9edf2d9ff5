"""The exported folder as transformers sees it: a plain Qwen2 and a plain fast tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from models.training.checkpoint import load_weights
from models.training.dialogues import Dialogue

GENERATION_BATCH = 32


def load_qwen2(folder: Path) -> Qwen2ForCausalLM:
    """Return the trunk as transformers' Qwen2, strict but for the MTP layer."""
    values = json.loads((folder / "config.json").read_text())
    for name in ("architectures", "model_type", "dtype", "torch_dtype"):
        values.pop(name)
    model = Qwen2ForCausalLM(Qwen2Config(**values)).float().eval()
    weights = load_weights(folder)
    trunk = {name: tensor for name, tensor in weights.items() if "mtp_layers" not in name}
    model.load_state_dict(trunk | {"lm_head.weight": trunk["model.embed_tokens.weight"]})
    return model


class Answer(NamedTuple):
    """One chat answer: the prompt's ids, the answer's ids and its text."""

    prompt: list[int]
    ids: list[int]
    text: str


class Oracle:
    """Generates with transformers from an exported folder."""

    def __init__(self, folder: Path) -> None:
        self.model = load_qwen2(folder)
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        self.stop_ids = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]

    def generate(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        processors: Sequence[LogitsProcessor] = (),
    ) -> list[list[int]]:
        """Return the greedy continuations, each cut after its first stop token."""
        width = max(len(prompt) for prompt in prompts)
        pad = self.stop_ids[-1]
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            out = self.model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=max_tokens,
                eos_token_id=self.stop_ids,
                pad_token_id=pad,
                logits_processor=LogitsProcessorList(processors),
            )
        return [self.cut(row) for row in out[:, width:].tolist()]

    def cut(self, ids: list[int]) -> list[int]:
        """Return ids up to and including the first stop token."""
        ends = [index for index, token in enumerate(ids) if token in self.stop_ids]
        return ids[: ends[0] + 1] if ends else ids

    def answer(self, dialogues: Sequence[Dialogue], max_tokens: int = 96) -> list[Answer]:
        """Write the next message of each dialogue."""
        template = self.tokenizer.apply_chat_template
        texts = [
            template(**dialogue.for_template(), tokenize=False, add_generation_prompt=True)
            for dialogue in dialogues
        ]
        prompts = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        answers = []
        for start in range(0, len(prompts), GENERATION_BATCH):
            batch = prompts[start : start + GENERATION_BATCH]
            for prompt, ids in zip(batch, self.generate(batch, max_tokens), strict=True):
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                answers.append(Answer(prompt, ids, text))
        return answers

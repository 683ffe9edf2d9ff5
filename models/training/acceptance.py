"""Acceptance of the MTP layer's drafts by the trunk."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LogitsProcessor

from models.training.model import ShoalTiny
from models.training.oracle import GENERATION_BATCH, Oracle

NUM_DRAFTS = 3


class GumbelNoise(LogitsProcessor):
    """Adds noise that depends on (row, position, token) only, so draft and target share it."""

    def __init__(self, num_rows: int, num_positions: int, vocab_size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand((num_rows, num_positions, vocab_size), generator=generator)
        self.noise = -(-uniform.clamp(1e-9, 1 - 1e-7).log()).log()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Make the arg max of scores [B, V] a sample of their distribution."""
        return scores + self.noise[:, input_ids.shape[1]]


def draft_hits(
    model: ShoalTiny, ids: list[int], prompt_length: int, noise: Tensor | None
) -> list[list[bool]]:
    """For every chain of drafts that starts in the generated part, True for each draft that hits.

    The chain of index p drafts positions p + 2, p + 3, p + 4 of ids; noise is [T, V].
    """
    row = torch.tensor([ids])
    outputs = model.draft(model.hidden(row)[:, :-1], row, NUM_DRAFTS)
    hits = []
    for output in outputs:
        logits = functional.linear(output[0, :-1], model.model.embed_tokens.weight)
        if noise is not None:
            logits = logits + noise[2 : len(ids)]
        hits.append((logits.argmax(-1) == row[0, 2:]).tolist())
    first = max(prompt_length - 2, 0)
    starts = range(first, len(hits[0]) - NUM_DRAFTS + 1)
    return [[hits[step][start + step] for step in range(NUM_DRAFTS)] for start in starts]


def conditional_shares(chains: Sequence[list[bool]]) -> list[float]:
    """Return the share of hits at each position among the chains that hit at all earlier ones."""
    shares = []
    for step in range(NUM_DRAFTS):
        alive = [chain[step] for chain in chains if all(chain[:step])]
        shares.append(sum(alive) / max(len(alive), 1))
    return shares


def text_acceptance(
    model: ShoalTiny, oracle: Oracle, prompts: list[list[int]], max_tokens: int, sampled: bool
) -> list[float]:
    """Measure on continuations of prompts of one length, greedy or sampled at temperature 1."""
    chains = []
    length = len(prompts[0])
    for start in range(0, len(prompts), GENERATION_BATCH):
        batch = prompts[start : start + GENERATION_BATCH]
        size = (len(batch), length + max_tokens, model.config.vocab_size)
        processors = [GumbelNoise(*size, seed=start)] if sampled else []
        texts = oracle.generate(batch, max_tokens, processors)
        for row, (prompt, text) in enumerate(zip(batch, texts, strict=True)):
            noise = processors[0].noise[row] if sampled else None
            chains += draft_hits(model, prompt + text, length, noise)
    return conditional_shares(chains)

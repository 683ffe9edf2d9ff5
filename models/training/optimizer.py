"""Optimizers by parameter, and their learning rate."""

import math

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from models.training.checkpoint import Progress

PEAK_RATE = 2e-3
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)


def make_optimizers(parameters: dict[str, nn.Parameter], use_muon: bool) -> list[Optimizer]:
    """Return the optimizers of the named parameters; only matrices decay.

    Muon takes the matrices between hidden states, with steps scaled to those of AdamW, and
    AdamW the embedding, norms and biases.
    """
    matrices = {n: p for n, p in parameters.items() if p.ndim == 2}
    hidden = [p for n, p in matrices.items() if use_muon and "embed_tokens" not in n]
    others = [p for n, p in matrices.items() if not use_muon or "embed_tokens" in n]
    vectors = [p for p in parameters.values() if p.ndim < 2]
    groups = [
        {"params": others, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizers: list[Optimizer] = [AdamW(groups, lr=PEAK_RATE, betas=BETAS)]
    if hidden:
        optimizers.append(Muon(hidden, PEAK_RATE, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"))
    return optimizers


def rate_factor(progress: Progress, budget: float, warmup_steps: int) -> float:
    """Return the share of the peak rate: linear warm-up, then a cosine down to a tenth."""
    done = min(progress.num_tokens / budget, 1.0)
    warmup = min(1.0, (progress.num_steps + 1) / warmup_steps)
    return warmup * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))

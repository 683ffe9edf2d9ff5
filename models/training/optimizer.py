"""Which optimizer moves which parameter."""

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

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
